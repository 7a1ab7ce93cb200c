"""Ports that the tasks of a cluster listen at, and the protection of connections."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Iterator
from dataclasses import dataclass

from keras_strategies.cluster.environment import SECRET, SECRET_CHARACTERS
from keras_strategies.cluster.resolver import ClusterResolver
from keras_strategies.cluster.spec import ClusterSpec, split_address, worker_addresses
from keras_strategies.errors import ClusterError

_ENGINES = {
    "jax": (
        ("JAX's service", "a port of the chief"),
        ("Gloo or NCCL", "ports of each worker"),
    ),
    "torch": (
        ("Torch's store", "a port of the chief"),
        ("Gloo or NCCL", "ports of each worker"),
    ),
    "tensorflow": (
        (
            "TensorFlow's server",
            "a port of each worker, at all addresses of its machine;\n"
            "programs that reach it can read and write files there",
        ),
    ),
}


@dataclass(frozen=True)
class PortUse:
    """Ports that serve one purpose.

    Args:
        purpose: str.
        found: str, their addresses, or another fact about them.
        is_problem: bool, whether the tasks would not start.
    """

    purpose: str
    found: str
    is_problem: bool = False


def open_ports(resolver: ClusterResolver, backend: str) -> Iterator[PortUse]:
    """The ports of a cluster's tasks; none for a single worker.

    Args:
        resolver: the description of the cluster.
        backend: str, the framework, which opens ports of its own between workers.
    """
    spec = resolver.cluster_spec()
    if "ps" in spec.jobs:
        yield from _parameter_servers(spec)
        yield _secret(is_needed=resolver.task_type != "evaluator")
        return
    if resolver.num_workers == 1:
        return
    addresses = worker_addresses(spec)
    yield PortUse(
        "start and heartbeats",
        f"{addresses[0]}; with `elastic`, the address of each worker",
    )
    yield from (PortUse(*use) for use in _ENGINES.get(backend, ()))
    yield PortUse("protection", "none: not authenticated, not encrypted")
    if _is_on_this_machine(addresses[0]):
        reachable = "programs of all users of this machine"
    else:
        reachable = (
            "every machine that no firewall blocks: give workers a\n"
            "network of their own, see docs/security.md"
        )
    yield PortUse("reachable by", reachable)


def _parameter_servers(spec: ClusterSpec) -> Iterator[PortUse]:
    addresses = [
        spec.task_address(job, index)
        for job in ("chief", "ps")
        if job in spec.jobs
        for index in spec.task_indices(job)
    ]
    yield PortUse("parameter servers", ", ".join(addresses))
    protection = f"authenticated by {SECRET}, encrypted (CurveZMQ)"
    yield PortUse("protection", protection)


def _secret(*, is_needed: bool) -> PortUse:
    # Its value is not shown.
    count = len(os.environ.get(SECRET, ""))
    found = f"{count} characters"
    if not count:
        found = "is not set; all tasks need the same, see docs/security.md"
    elif count < SECRET_CHARACTERS:
        found += f"; at least {SECRET_CHARACTERS} are needed"
    return PortUse(SECRET, found, is_needed and count < SECRET_CHARACTERS)


def _is_on_this_machine(address: str) -> bool:
    try:
        host, _ = split_address(address)
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except (ClusterError, ValueError):
        return False
