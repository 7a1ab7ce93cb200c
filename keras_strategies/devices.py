"""Names of devices, in all the spellings that people use.

The canonical form is the one of Keras, a kind and an index: `"gpu:0"`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from keras_strategies.errors import (
    DuplicateDeviceError,
    InvalidArgumentError,
    UnknownDeviceError,
)

KINDS = ("cpu", "gpu", "tpu", "mps", "xpu")
# torch says "cuda" (and "hip" builds say it too) where Keras says "gpu".
_ALIASES = {"cuda": "gpu", "xla_gpu": "gpu", "xla_cpu": "cpu"}

# "gpu", "gpu:0", "/gpu:0", "GPU:0", "/device:GPU:0" and
# "/job:localhost/replica:0/task:0/device:GPU:0".
_NAME = re.compile(
    r"""^(?:/job:[\w-]+)?(?:/replica:\d+)?(?:/task:\d+)?   # a TensorFlow prefix
        /?(?:device:)?
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
            is `"gpu:0"`), or a full TensorFlow name; or a `Device`.

    Returns:
        A `Device`.

    Raises:
        ValueError: if it is none of these.

    >>> str(parse_device("/job:localhost/replica:0/task:0/device:GPU:1"))
    'gpu:1'
    """
    if isinstance(name, Device):
        return name
    match = _NAME.match(name.strip()) if isinstance(name, str) else None
    if match:
        kind = match["kind"].lower()
        kind = _ALIASES.get(kind, kind)
        index = match["index"] or "0"
        if kind in KINDS and index != "*":
            return Device(kind, int(index))
    raise InvalidArgumentError(
        f"{name!r} is not a device name. Use a kind and an index, as in "
        f"'gpu:0' or '/job:localhost/replica:0/task:0/device:GPU:0'; "
        f"kinds are {', '.join(KINDS)}."
    )


def check_devices(
    names: Iterable[object], available: Sequence[Device], *, what: str = "devices"
) -> tuple[Device, ...]:
    """Reads a list of device names and holds it against what exists.

    Args:
        names: the names that were given.
        available: the devices that exist.
        what: str, the argument's name, for the messages.

    Returns:
        tuple of `Device`, in the given order.

    Raises:
        ValueError: for an empty list, a name that is not one, a device that
            does not exist or one named twice. The message lists what exists.
    """
    if isinstance(names, str):
        names = [names]
    devices = tuple(parse_device(name) for name in names)
    exist = ", ".join(str(device) for device in available)
    if not devices:
        raise InvalidArgumentError(
            f"`{what}` is empty. Name at least one of the devices that exist: {exist}."
        )
    for device in devices:
        if device not in available:
            raise UnknownDeviceError(
                f"`{what}` names {str(device)!r}, which does not exist here. "
                f"These do: {exist}."
            )
        if devices.count(device) > 1:
            raise DuplicateDeviceError(
                f"`{what}` names {str(device)!r} {devices.count(device)} times; "
                f"each replica needs a device of its own. These exist: {exist}."
            )
    return devices
