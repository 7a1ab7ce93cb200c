"""Torch's devices by their names in Keras."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from keras_strategies.devices import KINDS, Device

# Kinds with another name in torch.
_TORCH_KIND = {"gpu": "cuda", "tpu": "xla"}
_KIND = {kind: name for name, kind in _TORCH_KIND.items()}


@functools.cache
def torch_device(device: Device) -> torch.device:
    """The torch device of a name; torch's only CPU device for all virtual CPUs."""
    if device.kind == "cpu":
        return torch.device("cpu")
    return torch.device(_TORCH_KIND.get(device.kind, device.kind), device.index)


class DeviceName(str):
    """The name of a torch device, which also equals the `torch.device`.

    Keras calls `x.to(name)` on each argument of its operations if `x.device != name`,
    which is always true for a plain string. On the same device that call only releases
    the interpreter's lock, and another replica's thread takes it.
    """

    def __init__(self, name: object):
        self._device = torch.device(str(name))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, torch.device):
            return other == self._device
        return str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        if isinstance(other, torch.device):
            return other != self._device
        return str.__ne__(self, other)

    __hash__ = str.__hash__


def moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor on a device; on its own device the tensor itself.

    The host does not wait for a transfer to an accelerator, whose operations are
    ordered after it. Those of the host are not, so that it waits for its own memory.
    """
    return tensor.to(device, non_blocking=device.type != "cpu")


def device_of(tensor: torch.Tensor) -> Device:
    kind = _KIND.get(tensor.device.type, tensor.device.type)
    return Device(kind, tensor.device.index or 0)


def accelerators() -> list[Device]:
    """The accelerators of this process, of the kind that torch finds."""
    # Without a check whether it is available, which would start CUDA in this process;
    # where it is not, there are none.
    found = torch.accelerator.current_accelerator()
    kind = None if found is None else _KIND.get(found.type, found.type)
    if kind not in KINDS:
        return []
    return [Device(kind, i) for i in range(torch.accelerator.device_count())]


def memories(devices: Sequence[Device]) -> tuple[Device, ...]:
    """The devices with separate memory: all virtual CPUs are torch's one CPU."""
    first = {torch_device(device): device for device in reversed(devices)}
    return tuple(device for device in devices if device in first.values())
