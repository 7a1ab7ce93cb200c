"""Device names, in the spellings of Keras and the frameworks.

The canonical form is the one of Keras, a kind and an index: `"gpu:0"`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from keras_strategies.errors import (
    DuplicateDeviceError,
    InvalidArgumentError,
    UnknownDeviceError,
)

KINDS = ("cpu", "gpu", "tpu", "mps", "xpu")
# GPUs are "cuda" in torch, also in builds for ROCm, and "gpu" in Keras.
_ALIASES = {"cuda": "gpu", "xla_gpu": "gpu", "xla_cpu": "cpu"}

# "gpu", "gpu:0", "/gpu:0", "GPU:0", "/device:GPU:0", "/physical_device:GPU:0" and
# "/job:localhost/replica:0/task:0/device:GPU:0".
_NAME = re.compile(
    r"""^(?:/job:[\w-]+)?(?:/replica:\d+)?(?:/task:\d+)?   # a TensorFlow prefix
        /?(?:(?:physical_)?device:)?
        (?P<kind>[a-z_]+)(?::(?P<index>\d+|\*))?$""",
    re.IGNORECASE | re.VERBOSE,
)


@dataclass(frozen=True, order=True)
class Device:
    """A device of this machine: `Device("gpu", 0)`, written `gpu:0`."""

    kind: str
    index: int

    def __str__(self) -> str:
        return f"{self.kind}:{self.index}"


def parse_device(name: object) -> Device:
    """Reads a device name in any accepted spelling.

    Args:
        name: str, `"gpu:1"`, `"GPU:1"`, `"/gpu:1"`, `"cuda:1"`, `"gpu"` (which
            is `"gpu:0"`), or a full TensorFlow name; a `Device`; or a framework's
            device object: a `torch.device`, `jax.Device`, `tf.config.LogicalDevice`
            or `tf.config.PhysicalDevice`.

    Returns:
        A `Device`.

    Raises:
        ValueError: for anything else.

    >>> str(parse_device("/job:localhost/replica:0/task:0/device:GPU:1"))
    'gpu:1'
    """
    if isinstance(name, Device):
        return name
    text = _name_of_object(name)
    match = _NAME.match(text.strip()) if text is not None else None
    if match:
        kind = match["kind"].lower()
        kind = _ALIASES.get(kind, kind)
        index = match["index"] or "0"
        if kind in KINDS and index != "*":
            return Device(kind, int(index))
    raise InvalidArgumentError(
        f"{name!r} is not a device name. Use a kind and an index, as in "
        f"'gpu:0' or '/job:localhost/replica:0/task:0/device:GPU:0', or a device "
        f"object of the framework; kinds are {', '.join(KINDS)}."
    )


def is_device(value: object) -> bool:
    """Whether a value is one device: a string, or a device object of a framework."""
    return isinstance(value, Device) or _name_of_object(value) is not None


def _name_of_object(value: object) -> str | None:
    """The name in a string or in a framework's device object; None for others.

    Objects are recognized by their attributes, so no framework is imported.
    """
    if isinstance(value, str):
        return value
    module = type(value).__module__.partition(".")[0]
    if module == "torch" and type(value).__name__ == "device":
        return str(value)  # "cuda:1"
    if module == "tensorflow" and hasattr(value, "device_type"):
        return str(value.name)  # type: ignore[attr-defined]  # "/device:CPU:0"
    if hasattr(value, "platform") and hasattr(value, "client"):
        return _name_of_jax_device(value)
    return None


def _name_of_jax_device(device: Any) -> str:
    # The index counts the devices of one process, `id` the devices of all processes.
    local = list(device.client.local_devices())
    if device not in local:
        raise UnknownDeviceError(
            f"{device!r} is a device of another process. Name devices of this one: "
            f"{', '.join(map(repr, local))}."
        )
    return f"{device.platform}:{local.index(device)}"


def as_devices(devices: object) -> list[Device]:
    """Reads one device or an iterable of devices, as names or objects."""
    if is_device(devices):
        return [parse_device(devices)]
    if not isinstance(devices, Iterable):
        parse_device(devices)  # Raises an error that describes device names.
    return [parse_device(device) for device in devices]  # type: ignore[attr-defined]


def check_devices(
    names: object, available: Sequence[Device], *, what: str = "devices"
) -> tuple[Device, ...]:
    """Parses device names and checks that the devices exist.

    Args:
        names: device names, or device objects of a framework.
        available: the existing devices.
        what: str, the argument's name, for the messages.

    Returns:
        tuple of `Device`, in the given order.

    Raises:
        ValueError: for an empty list, an invalid name, a device that does not exist or
            is named twice. The message lists the existing devices.
    """
    devices = tuple(as_devices(names))
    exist = ", ".join(str(device) for device in available)
    if not devices:
        raise InvalidArgumentError(
            f"`{what}` is empty. Name at least one of the existing devices: {exist}."
        )
    for device in devices:
        if device not in available:
            raise UnknownDeviceError(
                f"`{what}` names {str(device)!r}, which does not exist here. "
                f"Name existing devices: {exist}."
            )
        if devices.count(device) > 1:
            raise DuplicateDeviceError(
                f"`{what}` names {str(device)!r} {devices.count(device)} times; "
                f"each replica needs a device of its own. Existing devices: {exist}."
            )
    return devices
