"""Weights that are gathered for an operation, and again for its backward pass.

As in ZeRO-3 (Rajbhandari et al., 2020) and PyTorch's FSDP (Zhao et al., 2023), a
process has its shards of all weights, and the full values of those that it computes
with. Autograd would keep a gathered weight for the backward pass of each operation:
here it keeps what gathers the weight again.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from keras_strategies.engines.torch.compat import (
    StorageWeakRef,
    storage_key,
    version_of,
)


class _Gather(torch.autograd.Function):
    """The full value of shards, in the dtype of the computation.

    Gradients are summed over processes in the dtype of the shards.
    """

    @staticmethod
    def forward(
        ctx: Any, shards: DTensor, placements: Any, dtype: torch.dtype
    ) -> DTensor:
        ctx.shards = shards.device_mesh, shards.placements, shards.dtype
        own: Any = shards.to(dtype)
        return own.redistribute(shards.device_mesh, placements)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: DTensor) -> tuple[DTensor, None, None]:  # type: ignore[override]
        mesh, placements, dtype = ctx.shards
        own: Any = gradient.to(dtype)
        return own.redistribute(mesh, placements), None, None


def check_version(shards: DTensor, version: int) -> None:
    """Raises an error if a weight has changed since its forward pass."""
    if version_of(shards) != version:
        raise RuntimeError(
            "A weight was assigned between the forward and the backward pass, "
            "which needs the value of before. Assign it after the backward pass."
        )


@dataclass(frozen=True)
class _Source:
    """Where a gathered weight comes from: `again` gathers its local tensor."""

    again: Callable[[], torch.Tensor]
    memory: Any


@dataclass(frozen=True)
class _View:
    """A tensor that autograd saves, in the memory of a gathered weight."""

    source: _Source
    #: Of the local tensor: shape, stride, offset.
    local: tuple[torch.Size, tuple[int, ...], int]
    #: The DTensor, without its values; None for an ordinary tensor.
    spread: tuple[Any, Any, torch.Size, tuple[int, ...]] | None

    def again(self) -> torch.Tensor:
        local = self.source.again().as_strided(*self.local)
        if self.spread is None:
            return local
        mesh, placements, shape, stride = self.spread
        return DTensor.from_local(
            local, mesh, placements, run_check=False, shape=shape, stride=stride
        )


class SavedWeights:
    """Keeps how to gather weights, where autograd would keep gathered weights."""

    def __init__(self) -> None:
        self._sources: dict[int, _Source] = {}

    def note(self, local: torch.Tensor, again: Callable[[], torch.Tensor]) -> None:
        """Takes a gathered weight.

        Args:
            local: its tensor in this process.
            again: gathers the same tensor.
        """
        memory = StorageWeakRef(local.untyped_storage())
        self._sources[storage_key(local)] = _Source(again, memory)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """A context in which autograd keeps no gathered weight."""
        with torch.autograd.graph.saved_tensors_hooks(self._packed, _unpacked):
            yield

    @torch.no_grad()
    def _packed(self, tensor: torch.Tensor) -> Any:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        source = None if local.is_sparse else self._sources.get(storage_key(local))
        # Another tensor may be where a weight was.
        if source is None or source.memory.expired():
            return tensor, version_of(tensor)
        spread = None
        if isinstance(tensor, DTensor):
            on = tensor.device_mesh, tensor.placements
            spread = (*on, tensor.shape, tensor.stride())
        place = local.shape, local.stride(), int(local.storage_offset())
        return _View(source, place, spread)


def _unpacked(packed: Any) -> torch.Tensor:
    if isinstance(packed, _View):
        return packed.again()
    tensor, version = packed
    if version_of(tensor) != version:
        raise RuntimeError(
            "A tensor that the backward pass needs was modified in place after the "
            f"operation that saved it: shape {tuple(tensor.shape)}, {tensor.dtype}."
        )
    return tensor  # type: ignore[no-any-return]


class GatheredWeights:
    """Gathers weights, and forgets them when no operation uses them."""

    def __init__(self) -> None:
        self._values: dict[tuple[Any, ...], weakref.ref[DTensor]] = {}
        self._saved = SavedWeights()

    def gather(
        self, shards: DTensor, placements: Any, dtype: torch.dtype | None
    ) -> DTensor:
        """The weight with other placements.

        Args:
            shards: the weight.
            placements: those of the result, one for each axis of the mesh.
            dtype: that of the result; None for the weight's.
        """
        dtype = dtype or shards.dtype
        version = version_of(shards)
        # An assignment in a call makes another version. What is gathered without
        # gradients has none.
        key = id(shards), version, dtype, torch.is_grad_enabled()
        kept = self._values.get(key)
        found = None if kept is None else kept()
        if found is not None:
            return found
        gathered: DTensor = _Gather.apply(shards, placements, dtype)
        self._values[key] = weakref.ref(gathered)

        def again() -> torch.Tensor:
            check_version(shards, version)
            return _Gather.apply(shards.detach(), placements, dtype).to_local()  # type: ignore[no-any-return]

        if tuple(placements) != tuple(shards.placements):
            self._saved.note(gathered.to_local(), again)
        return gathered

    def saved_as_shards(self) -> contextlib.AbstractContextManager[None]:
        """A context in which autograd keeps no gathered weight."""
        return self._saved.entered()
