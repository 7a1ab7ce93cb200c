"""Copies of variables on replicas."""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING, Any

import torch

from keras_strategies.devices import Device
from keras_strategies.engines.torch.compat import version_of
from keras_strategies.engines.torch.devices import moved, torch_device
from keras_strategies.keras_compat.variables.values import raw_value
from keras_strategies.runtime.placement import Placement

if TYPE_CHECKING:
    # torch.distributed.tensor takes a second to import.
    from keras_strategies.engines.torch.model_parallel.packed_weights import (
        CallWeights,
        PackedWeights,
    )


class ReplicaVariables:
    """Values of variables on the device of each replica.

    A replica on the variable's own device (for torch, all virtual CPUs are one device)
    gets an alias of its memory; other replicas get a copy, which is persistent if
    variables are mirrored, else made for each call.

    Args:
        placement: the devices of replicas and variables.
        shards: gathers the variables of which each worker has a shard; None without
            any.
    """

    def __init__(self, placement: Placement, shards: PackedWeights | None = None):
        self._placement = placement
        self.shards = shards
        self._devices = [torch_device(device) for device in placement.replicas]
        self._mirrors = _Mirrors()

    def copy(self, replica_id: int, variable: Any) -> torch.Tensor | None:
        """The value of a variable for one replica; a leaf of its own graph."""
        raw = raw_value(variable)
        if raw is None:
            return None
        if self.shards is not None and self.shards.is_in_shards(raw):
            return _leaf(self.shards.full(raw), raw)
        device = self._devices[replica_id]
        if raw.device == device:
            local = raw.detach()
        elif self._placement.mirrored:
            local = self._mirrors.get(raw, device)
        else:
            local = moved(raw.detach(), device)
        # A new tensor outside of any graph in every case above.
        return _leaf(local, raw)

    def of_call(self, layer: Any) -> CallWeights | None:
        """The variables in shards in a call of a layer; None without any."""
        return None if self.shards is None else self.shards.of_call(layer)

    def ordinary(self) -> contextlib.AbstractContextManager[None]:
        """Entered around what replicas compute, with ordinary tensors."""
        if self.shards is None:
            return contextlib.nullcontext()
        return self.shards.ordinary()

    def in_step(self) -> contextlib.AbstractContextManager[None]:
        """Entered around a step, which all workers do alike."""
        if self.shards is None:
            return contextlib.nullcontext()
        return self.shards.in_step()

    def with_shards(self, gradient: torch.Tensor, raw: Any) -> torch.Tensor:
        """A gradient as the tensor of a variable has it, which may be in shards."""
        if self.shards is None or not self.shards.is_in_shards(raw):
            return gradient
        return self.shards.shards_of(gradient, raw)

    def without_shards(self, tensor: Any) -> Any:
        """The full tensor of one that may be in shards."""
        if self.shards is None or not self.shards.is_in_shards(tensor):
            return tensor
        return self.shards.full(tensor)

    def value(self, variable: Any) -> torch.Tensor:
        """The full value of a variable, with its gradient."""
        raw: Any = raw_value(variable)
        if self.shards is not None and self.shards.is_in_shards(raw):
            raw = self.shards.value_with_gradient(raw)
        return raw  # type: ignore[no-any-return]

    def mirrors(self, variable: Any) -> list[tuple[Device, torch.Tensor]]:
        """The persistent copies on devices other than the variable's."""
        raw = raw_value(variable)
        found = []
        for device in self._placement.replicas if self._placement.mirrored else ():
            # Virtual CPUs have one memory, that of the variable.
            own = torch_device(device)
            mirror = self._mirrors.peek(raw, own)
            if raw.device != own and mirror is not None:
                found.append((device, mirror))
        return found


def _leaf(local: torch.Tensor, raw: torch.Tensor) -> torch.Tensor:
    """A copy with a gradient, also if it is first read without gradients."""
    return local.requires_grad_(
        raw.requires_grad and not torch.is_inference_mode_enabled()
    )


class _Mirrors:
    """Copies of tensors on other devices, updated lazily.

    Torch counts in-place changes of a tensor, so a copy is renewed after an update, a
    load or an assignment, and only then.
    """

    def __init__(self) -> None:
        self._copies: dict[tuple[int, torch.device], tuple[Any, int, torch.Tensor]] = {}

    def get(self, raw: torch.Tensor, device: torch.device) -> torch.Tensor:
        key = (id(raw), device)
        entry = self._copies.get(key)
        if entry is not None and entry[0]() is raw and entry[1] == version_of(raw):
            return entry[2].detach()
        # A new tensor, not a copy in place: an unfinished backward pass may still
        # need the old values.
        copy = moved(raw.detach(), device)
        gone = weakref.ref(raw, lambda _: self._copies.pop(key, None))
        self._copies[key] = (gone, version_of(raw), copy)
        return copy.detach()

    def peek(self, raw: torch.Tensor, device: torch.device) -> torch.Tensor | None:
        """The existing copy on a device, possibly out of date; None without one."""
        entry = self._copies.get((id(raw), device))
        return entry[2] if entry is not None and entry[0]() is raw else None
