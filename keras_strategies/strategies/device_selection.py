"""Selection of the devices of a strategy."""

from __future__ import annotations

import os
from collections.abc import Sequence

from keras_strategies.cluster.environment import DEVICES_PER_WORKER, find_local_number
from keras_strategies.cluster.resolvers.environment.process_numbers import (
    RankAndSize,
)
from keras_strategies.devices import Device, as_devices, check_devices
from keras_strategies.engines import get_engine
from keras_strategies.errors import ClusterError, InvalidArgumentError
from keras_strategies.runtime.engine import Engine
from keras_strategies.types import check_count


def set_virtual_cpu_devices(count: int) -> None:
    """Divides the CPU into `count` devices, for development without accelerators.

    Args:
        count: int, 1 or more.

    Raises:
        ValueError: if `count` is not a positive int.
        RuntimeError: if the backend has already been used, after which its devices
            cannot change. Call the function first in the program.

    Example:

    >>> ks.set_virtual_cpu_devices(4)
    >>> strategy = ks.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2", "cpu:3"])
    """
    check_count("count", count, 1, "a number of devices,")
    get_engine().set_virtual_cpu_devices(count)


# The accelerator that each engine keeps for this process; None for all.
_kept: dict[Engine, Device | None] = {}

# Kinds of which each process has its own, or of which several processes share one.
_SHARED_KINDS = ("cpu", "mps", "tpu")

# Variables by which a launcher or a user leaves some accelerators to a process.
_VISIBLE = (
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "ZE_AFFINITY_MASK",
)


def keep_own_accelerator(engine: Engine) -> Device | None:
    """The accelerator of this process, if a launcher runs several on this machine.

    It is chosen once for the process, and before the engine starts, since JAX allocates
    memory on each accelerator that it sees.

    Returns:
        A device; None if the process may use all that the engine lists.

    Raises:
        ValueError: if there are fewer accelerators than processes.
    """
    if engine not in _kept:
        local = find_local_number()
        _kept[engine] = (
            None
            if local is None
            else engine.keep_accelerator(lambda found: own_accelerator(found, local))
        )
    return _kept[engine]


def own_accelerator(found: Sequence[Device], local: RankAndSize) -> Device | None:
    """The accelerator of a process that shares its machine with others.

    Args:
        found: the accelerators that the process sees, the preferred kind first.
        local: the number of the process.

    Returns:
        The accelerator of its number, or the only one that an environment variable
        leaves to it; None if it may use all.

    Raises:
        ValueError: if there are fewer accelerators than processes.
    """
    kind = found[0].kind if found else "cpu"
    found = [device for device in found if device.kind == kind]
    if kind in _SHARED_KINDS or local.size == 1:
        return None
    restricted = [name for name in _VISIBLE if os.environ.get(name)]
    if len(found) == 1 and restricted:
        return found[0]
    needed = local.size or local.rank + 1
    if needed > len(found):
        given = [local.variables, *(f"{n}={os.environ[n]}" for n in restricted)]
        least = "" if local.size else "At least "
        raise ClusterError(
            f"{least}{needed} processes run on this machine ({', '.join(given)}), and "
            f"this one sees {len(found)} accelerators: {', '.join(map(str, found))}. "
            "Each process needs one of its own. Start at most as many processes as "
            "accelerators, set a different CUDA_VISIBLE_DEVICES for each, or pass "
            "`devices` to the strategy."
        )
    return found[local.rank]


def default_devices(engine: Engine) -> tuple[Device, ...]:
    """The devices of a strategy without `devices`.

    The accelerator of this process, if a launcher runs several on this machine; else
    `all_devices`.
    """
    own = keep_own_accelerator(engine)
    return all_devices(engine) if own is None else (own,)


def all_devices(engine: Engine) -> tuple[Device, ...]:
    """All accelerators of one kind; without any, all CPU devices."""
    wanted = os.environ.get(DEVICES_PER_WORKER, "")
    if wanted:
        if not wanted.isdigit() or int(wanted) < 1:
            raise InvalidArgumentError(
                f"The environment variable {DEVICES_PER_WORKER} is {wanted!r}, not a "
                "number of virtual CPU devices of 1 or more."
            )
        make_cpu_devices(engine, int(wanted))
    devices = engine.local_devices()
    kind = devices[0].kind
    return tuple(device for device in devices if device.kind == kind)


def choose_devices(
    engine: Engine, names: object, what: str = "devices"
) -> tuple[Device, ...]:
    """The named devices, after creating virtual CPU devices if possible."""
    wanted = as_devices(names)
    cpus = [device.index + 1 for device in wanted if device.kind == "cpu"]
    if cpus and max(cpus) > 1:
        make_cpu_devices(engine, max(cpus))
    return check_devices(wanted, engine.local_devices(), what=what)


def make_cpu_devices(engine: Engine, count: int) -> None:
    """Creates `count` CPU devices, if fewer exist."""
    if engine.cpu_device_count() < count:
        engine.set_virtual_cpu_devices(count)
