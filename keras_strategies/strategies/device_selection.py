"""Selection of the devices of a strategy."""

from __future__ import annotations

import os

from keras_strategies.cluster.environment import DEVICES_PER_WORKER
from keras_strategies.devices import Device, as_devices, check_devices
from keras_strategies.engines import get_engine
from keras_strategies.errors import InvalidArgumentError
from keras_strategies.runtime.engine import Engine


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
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise InvalidArgumentError(
            "`set_virtual_cpu_devices` needs a number of devices, 1 or more. "
            f"Received: {count!r}"
        )
    get_engine().set_virtual_cpu_devices(count)


def default_devices(engine: Engine) -> tuple[Device, ...]:
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
