"""TensorFlow's devices by their names in Keras."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from keras_strategies.devices import KINDS, Device, parse_device
from keras_strategies.errors import BackendInUseError


def tf_device(device: Device) -> str:
    """TensorFlow's name of a device: `/device:CPU:0`."""
    return f"/device:{device.kind.upper()}:{device.index}"


def device_of(tensor: Any) -> Device:
    """The device of a tensor or variable; `cpu:0` if a graph does not place it."""
    return parse_device(tensor.device) if tensor.device else Device("cpu", 0)


def local_devices() -> tuple[Device, ...]:
    """All devices, accelerators first.

    Counted from the configuration, because listing the logical devices fixes them for
    the life of the process.
    """
    counts = {kind: _logical_count(kind) for kind in KINDS}
    accelerators = [
        Device(kind, i) for kind in KINDS if kind != "cpu" for i in range(counts[kind])
    ]
    cpus = [Device("cpu", i) for i in range(counts["cpu"])]
    return (*accelerators, *cpus)


def cpu_count() -> int:
    """CPU devices that exist, or will when TensorFlow is first used."""
    return _logical_count("cpu")


def _logical_count(kind: str) -> int:
    # None: not configured, which makes one logical device.
    return sum(
        len(tf.config.get_logical_device_configuration(device) or [None])
        for device in tf.config.get_visible_devices(kind.upper())
    )


def hide_others(device: Device) -> Device:
    """Hides the other accelerators of its kind from TensorFlow, if it is not in use.

    Returns:
        The device, by its name from now on.
    """
    kind = device.kind.upper()
    visible = tf.config.get_visible_devices(kind)
    if len(visible) <= device.index:
        return device  # One of the logical devices of a configured one.
    try:
        tf.config.set_visible_devices(visible[device.index], kind)
    except RuntimeError:  # TensorFlow has been used, with all devices.
        return device
    return Device(device.kind, 0)


def set_virtual_cpus(count: int) -> None:
    """Divides the CPU into `count` devices; they share its cores and its memory."""
    if cpu_count() == count:
        return
    configuration = [tf.config.LogicalDeviceConfiguration() for _ in range(count)]
    (cpu,) = tf.config.list_physical_devices("CPU")
    try:
        tf.config.set_logical_device_configuration(cpu, configuration)
    except RuntimeError as error:
        if cpu_count() >= count:
            return
        raise BackendInUseError(
            f"{count} CPU devices were requested, but TensorFlow has already been "
            f"used in this process, with {cpu_count()} CPU devices, and can no longer "
            f"change them. Call `ks.set_virtual_cpu_devices({count})` first, right "
            "after the imports, before any tensor, variable or model is created. In a "
            "notebook, restart the kernel."
        ) from error
