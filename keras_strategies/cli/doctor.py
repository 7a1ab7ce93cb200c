"""`keras-strategies doctor`: what a process would train on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from keras_strategies import __version__
from keras_strategies.cli.all_reduce import timed_all_reduce
from keras_strategies.cli.peers import find_peers, listening
from keras_strategies.cluster import ClusterResolver, find_cluster
from keras_strategies.cluster.environment import (
    DEVICES_PER_WORKER,
    cluster_variables,
)
from keras_strategies.errors import KerasStrategiesError

_FRAMEWORKS = ("jax", "torch", "tensorflow")
# The same module comes under several names.
_ALSO = {"tensorflow": ("tensorflow_cpu", "tf_nightly"), "keras": ("keras-nightly",)}
_CONFIGURES = ("CUDA_VISIBLE_DEVICES", DEVICES_PER_WORKER, "JAX_PLATFORMS", "XLA_FLAGS")


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Args:
        what: str, such as `"keras"`.
        found: str.
        is_problem: bool, whether training would fail on it.
    """

    what: str
    found: str
    is_problem: bool = False


@dataclass
class Surroundings:
    """What checks between tasks know, and tell those that come after them.

    Args:
        resolver: who is who; None without a cluster.
        timeout: float, the seconds that a check may wait.
        doctors: set of str, the other tasks where a doctor answers.
    """

    resolver: ClusterResolver | None
    timeout: float
    doctors: set[str] = field(default_factory=set)


Check = Callable[[Surroundings], Iterable[Finding]]


def doctor(timeout_seconds: float = 10.0) -> int:
    """Prints what there is: versions, devices, the cluster and its other tasks.

    Args:
        timeout_seconds: float, how long to wait for the other tasks.

    Returns:
        int, 0, or 1 if there are problems.
    """
    problems = 0
    resolver, cluster = _cluster()
    around = Surroundings(resolver, timeout_seconds)
    for title, findings in (
        ("versions", _versions()),
        ("devices", _devices()),
        ("cluster", cluster),
        *((title, check(around)) for title, check in CHECKS),
    ):
        print(title)
        for finding in findings:
            mark = "!" if finding.is_problem else " "
            print(f"{mark} {finding.what:<22} {finding.found}", flush=True)
            problems += finding.is_problem
    print(f"{problems} problems" if problems != 1 else "1 problem", flush=True)
    return 1 if problems else 0


def _versions() -> Iterator[Finding]:
    yield Finding("keras-strategies", __version__)
    yield Finding("python", f"{platform.python_version()} ({sys.executable})")
    keras = _version("keras")
    yield Finding("keras", keras or "is not installed: `pip install keras`", not keras)
    for name in _FRAMEWORKS:
        yield Finding(name, _version(name) or "is not installed")


def _version(package: str) -> str:
    for name in (package, *_ALSO.get(package, ())):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def _devices() -> Iterator[Finding]:
    for name in _CONFIGURES:
        if name in os.environ:
            yield Finding(name, repr(os.environ[name]))
    # The first use of Keras and of its framework, which may fail in any way.
    try:
        from keras_strategies.backends import backend_name, get_backend
        from keras_strategies.strategies.devices import default_devices

        yield Finding("backend", backend_name())
        backend = get_backend()
        chosen = default_devices(backend)
        devices = backend.local_devices()
    except Exception as error:
        yield Finding("backend", f"{type(error).__name__}: {error}", True)
        return
    yield Finding("devices", ", ".join(str(device) for device in devices))
    count = len(chosen)
    yield Finding(
        "MirroredStrategy()",
        f"{count} replica{'s' * (count != 1)}: {', '.join(str(d) for d in chosen)}",
    )


def _cluster() -> tuple[ClusterResolver | None, list[Finding]]:
    findings = [Finding(name, repr(text)) for name, text in cluster_variables().items()]
    try:
        resolver = find_cluster()
    except KerasStrategiesError as error:
        return None, [*findings, Finding("cluster", str(error), True)]
    if resolver is None or not resolver.cluster_spec():
        return None, [*findings, Finding("cluster", "none: this is the only worker")]
    spec = resolver.cluster_spec()
    findings.append(Finding("found by", type(resolver).__name__))
    findings.append(
        Finding(
            "this process is",
            f"{resolver.task_type} {resolver.task_id}"
            + (", the chief" if resolver.is_chief else ""),
        )
    )
    for job in spec.jobs:
        addresses = ", ".join(str(address) for address in spec.job_tasks(job))
        findings.append(Finding(job, addresses))
    return resolver, findings


def _peers(around: Surroundings) -> Iterator[Finding]:
    resolver, timeout = around.resolver, around.timeout
    if resolver is None or resolver.task_type is None or resolver.task_id is None:
        yield Finding("peers", "none")
        return
    spec = resolver.cluster_spec()
    own = f"{resolver.task_type} {resolver.task_id}"
    deadline = time.monotonic() + timeout
    # An evaluator may have no address of its own.
    known = resolver.task_type in spec.jobs
    address = spec.task_address(resolver.task_type, resolver.task_id) if known else ""
    with listening(own, address) as listener:
        if listener.problem:
            yield Finding(own, f"cannot listen on {address!r}: {listener.problem}")
        peers = find_peers(spec, own, timeout)
        for peer in peers:
            yield Finding(peer.task, f"{peer.address}  {peer.found}", not peer.answers)
        doctors = {peer.task for peer in peers if peer.is_doctor and peer.answers}
        around.doctors = doctors
        if not listener.problem:
            left = max(0.0, deadline - time.monotonic())
            if not listener.wait_for(doctors, left):
                missing = ", ".join(sorted(doctors - listener.visitors))
                yield Finding(
                    own, f"is not reached at {address!r} from {missing}", True
                )


def _all_reduce(around: Surroundings) -> Iterator[Finding]:
    resolver = around.resolver
    if resolver is None or resolver.num_workers == 1:
        yield Finding("all-reduce", "none: this is the only worker")
        return
    own = f"{resolver.task_type} {resolver.task_id}"
    spec = resolver.cluster_spec()
    workers = {
        f"{job} {index}"
        for job in ("chief", "worker")
        if job in spec.jobs
        for index in spec.task_indices(job)
    }
    missing = sorted(workers - around.doctors - {own})
    # What the others are is said under "peers".
    if "ps" in spec.jobs or own not in workers:
        yield Finding("all-reduce", "none: it is between workers without servers")
    elif missing:
        found = f"not measured: no doctor answers as {', '.join(missing)}"
        yield Finding("all-reduce", found)
    else:
        try:
            timings = timed_all_reduce(around.timeout)
        except RuntimeError as error:
            yield Finding("all-reduce", str(error), True)
            return
        for timing in timings:
            yield Finding(f"{timing.nbytes / 1e6:.0f} MB", str(timing))


# What is checked between tasks, in this order.
CHECKS: tuple[tuple[str, Check], ...] = (
    ("peers", _peers),
    ("all-reduce", _all_reduce),
)
