"""`keras-strategies doctor`: report of versions, devices, cluster and next steps."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from keras_strategies import __version__
from keras_strategies.cluster import ClusterResolver, find_cluster
from keras_strategies.cluster.environment import (
    DEVICES_PER_WORKER,
    cluster_variables,
)
from keras_strategies.errors import EXPLAIN, KerasStrategiesError
from keras_strategies.text_tables import counted, fact_lines, rule
from keras_strategies.tools.open_ports import open_ports
from keras_strategies.tools.reachability import find_peers, listening

_WIDTH = 72
_NAMES = 24
_FRAMEWORKS = ("jax", "torch", "tensorflow")
# Other distributions of the same module.
_ALIASES = {"tensorflow": ("tensorflow_cpu", "tf_nightly"), "keras": ("keras-nightly",)}
_VARIABLES = ("CUDA_VISIBLE_DEVICES", DEVICES_PER_WORKER, "JAX_PLATFORMS", "XLA_FLAGS")


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
class CheckContext:
    """Results of earlier checks, for later ones.

    Args:
        timeout: float, the seconds that a check may wait.
        backend: str, the framework that `KERAS_BACKEND` names; Keras's default
            without it.
        resolver: the description of the cluster; None without one.
        installed: list of str, the frameworks that are installed.
        devices: list of str, what `MirroredStrategy()` uses; empty if the backend
            cannot be imported.
    """

    timeout: float
    backend: str = "tensorflow"
    resolver: ClusterResolver | None = None
    installed: list[str] = field(default_factory=list)
    devices: list[str] = field(default_factory=list)


Check = Callable[[CheckContext], Iterable[Finding]]


def doctor(timeout_seconds: float = 10.0) -> int:
    """Prints versions, devices, the cluster and its other tasks, and what to do next.

    Args:
        timeout_seconds: float, time to wait for the other tasks.

    Returns:
        int, 0, or 1 if there are problems.
    """
    context = CheckContext(
        timeout_seconds, os.environ.get("KERAS_BACKEND", "tensorflow")
    )
    problems = 0
    for number, (title, check) in enumerate(CHECKS):
        _print_title(title if number == 0 else f"\n{title}")
        for finding in check(context):
            mark = "!" if finding.is_problem else " "
            _print_fact(f"{mark} {finding.what}", finding.found)
            problems += finding.is_problem
    _print_title(f"\nnext ({counted(problems, 'problem')})")
    for number, step in enumerate(next_steps(context, problems), 1):
        _print_fact(f"  {number}", step, names=0)
    return 1 if problems else 0


def _print_title(title: str) -> None:
    print(f"{title}\n{rule(_WIDTH)}", flush=True)


def _print_fact(name: str, value: str, names: int = _NAMES) -> None:
    print("\n".join(fact_lines([(name, value)], names)), flush=True)


def next_steps(context: CheckContext, problems: int) -> list[str]:
    """Recommended next steps.

    Args:
        context: results of the checks.
        problems: int, number of problems found.
    """
    if context.backend not in context.installed:
        return [_choose_a_backend(context.installed)]
    if problems:
        return [
            f"Fix the lines marked with `!`; for causes see `{EXPLAIN}`.",
            "Run `keras-strategies doctor` again, in all tasks at the same time.",
        ]
    if context.resolver is not None and context.resolver.num_workers > 1:
        return _train_on_the_cluster(context.resolver)
    return _train_on_this_machine(context.devices)


def _choose_a_backend(installed: list[str]) -> str:
    if not installed:
        return (
            "Install a framework, and choose it before Keras is imported:\n"
            "`pip install jax` and `export KERAS_BACKEND=jax`; or torch, tensorflow."
        )
    return (
        "Choose a framework that is installed, before Keras is imported:\n"
        + " or ".join(f"`export KERAS_BACKEND={name}`" for name in installed)
        + "."
    )


def _train_on_the_cluster(resolver: ClusterResolver) -> list[str]:
    if "ps" in resolver.cluster_spec().jobs:
        return [
            "Train with `ks.ParameterServerStrategy()` in the task `chief`; serve with "
            "`ks.Server(resolver).join()`\nin the tasks `worker` and `ps`."
        ]
    return [
        "Start the same script in every task. It begins with\n"
        "`strategy = ks.MultiWorkerMirroredStrategy()`."
    ]


def _train_on_this_machine(devices: list[str]) -> list[str]:
    if len(devices) > 1:
        return [
            f"Train on {counted(len(devices), 'device')}: "
            "`strategy = ks.MirroredStrategy()`."
        ]
    device = devices[0]
    if not device.startswith("cpu"):
        return [
            f"Train on {device}: `strategy = ks.OneDeviceStrategy({device!r})`.",
            "With more machines, start the script on each: "
            "`strategy = ks.MultiWorkerMirroredStrategy()`.",
        ]
    return [
        "To try two replicas on this CPU, make virtual devices first in the script:\n"
        "`ks.set_virtual_cpu_devices(2)`, then `strategy = ks.MirroredStrategy()`.",
        "To try two workers: `keras-strategies launch --workers 2 script.py`.",
    ]


def _versions(context: CheckContext) -> Iterator[Finding]:
    yield Finding("keras-strategies", __version__)
    yield Finding("python", f"{platform.python_version()} ({sys.executable})")
    taken = _releases_taken()
    keras = _version("keras")
    found = keras + _outside(keras, taken.get("keras"))
    yield Finding("keras", found or "is not installed: `pip install keras`", not keras)
    for name in _FRAMEWORKS:
        version = _version(name)
        if version:
            context.installed.append(name)
        found = version + _outside(version, taken.get(name))
        yield Finding(name, found or "is not installed")


def _releases_taken() -> dict[str, Any]:
    """`SpecifierSet`s of releases that the installed wheel allows."""
    try:
        from packaging.requirements import Requirement  # Keras depends on it.

        lines = importlib.metadata.requires("keras-strategies") or []
    except ImportError:
        # Without Keras, or without a wheel.
        return {}
    return {each.name: each.specifier for each in map(Requirement, lines)}


def _outside(version: str, taken: Any) -> str:
    """What to say of a release that the wheel does not allow; empty for others."""
    if not version or taken is None or taken.contains(version, prereleases=True):
        return ""
    return f", not tested: this package takes {taken}"


def _version(package: str) -> str:
    for name in (package, *_ALIASES.get(package, ())):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def _devices(context: CheckContext) -> Iterator[Finding]:
    for name in _VARIABLES:
        if name in os.environ:
            yield Finding(name, repr(os.environ[name]))
    # The first use of Keras and of its framework, which may fail in any way.
    try:
        from keras_strategies.engines import backend_name, get_engine
        from keras_strategies.strategies.device_selection import default_devices

        yield Finding("backend", backend_name())
        engine = get_engine()
        chosen = default_devices(engine)
        devices = engine.local_devices()
    except Exception as error:
        yield Finding("backend", f"{type(error).__name__}: {error}", True)
        return
    yield Finding("devices", ", ".join(str(device) for device in devices))
    context.devices = [str(device) for device in chosen]
    replicas = counted(len(chosen), "replica")
    yield Finding("MirroredStrategy()", f"{replicas}: {', '.join(context.devices)}")


def _cluster(context: CheckContext) -> Iterator[Finding]:
    for name, text in cluster_variables().items():
        yield Finding(name, repr(text))
    try:
        resolver = find_cluster()
    except KerasStrategiesError as error:
        yield Finding("cluster", str(error), True)
        return
    if resolver is None or not resolver.cluster_spec():
        yield Finding("cluster", "none: this is the only worker")
        return
    context.resolver = resolver
    spec = resolver.cluster_spec()
    chief = ", the chief" if resolver.is_chief else ""
    yield Finding("found by", type(resolver).__name__)
    yield Finding("this process is", f"{resolver.task_type} {resolver.task_id}{chief}")
    for job in spec.jobs:
        addresses = ", ".join(str(address) for address in spec.job_tasks(job))
        yield Finding(job, addresses)


def _ports(context: CheckContext) -> Iterator[Finding]:
    resolver = context.resolver
    uses = list(open_ports(resolver, context.backend)) if resolver else []
    if not uses:
        yield Finding("ports", "none: a single worker listens nowhere")
    for use in uses:
        yield Finding(use.purpose, use.found, use.is_problem)


def _peers(context: CheckContext) -> Iterator[Finding]:
    resolver, timeout = context.resolver, context.timeout
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
        if not listener.problem:
            left = max(0.0, deadline - time.monotonic())
            if not listener.wait_for(doctors, left):
                missing = ", ".join(sorted(doctors - listener.visitors))
                yield Finding(
                    own, f"is unreachable at {address!r} from {missing}", True
                )


# The checks, in their order.
CHECKS: tuple[tuple[str, Check], ...] = (
    ("versions", _versions),
    ("devices", _devices),
    ("cluster", _cluster),
    ("ports", _ports),
    ("peers", _peers),
)
