"""Weights that are gathered for an operation, and again for its backward pass.

As in ZeRO-3 (Rajbhandari et al., 2020) and PyTorch's FSDP (Zhao et al., 2023), a
process has its shards of all weights, and the full values of those that it computes
with. Autograd would keep a gathered weight for the backward pass of each operation:
here it keeps what gathers the weight again.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
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


@dataclass(frozen=True)
class _Gathered:
    """Where a gathered weight comes from."""

    shards: DTensor
    version: int
    placements: Any
    dtype: torch.dtype
    memory: Any

    def again(self) -> torch.Tensor:
        """The full value in this process."""
        if version_of(self.shards) != self.version:
            raise RuntimeError(
                "A weight was assigned between the forward and the backward pass, "
                "which needs the value of before. Assign it after the backward pass."
            )
        gathered = _Gather.apply(self.shards.detach(), self.placements, self.dtype)
        return gathered.to_local()


@dataclass(frozen=True)
class _View:
    """A tensor that autograd saves, in the memory of a gathered weight."""

    source: _Gathered
    shape: torch.Size
    stride: tuple[int, ...]
    #: Of the local tensor: shape, stride, offset.
    local: tuple[torch.Size, tuple[int, ...], int]
    mesh: Any
    placements: Any

    def again(self) -> DTensor:
        local = self.source.again().as_strided(*self.local)
        return DTensor.from_local(
            local,
            self.mesh,
            self.placements,
            run_check=False,
            shape=self.shape,
            stride=self.stride,
        )


class GatheredWeights:
    """Gathers weights, and forgets them when no operation uses them."""

    def __init__(self) -> None:
        self._values: dict[tuple[Any, ...], weakref.ref[DTensor]] = {}
        self._sources: dict[int, _Gathered] = {}

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
        # An assignment in a call makes another version. What is gathered without
        # gradients has none.
        key = id(shards), version_of(shards), dtype, torch.is_grad_enabled()
        kept = self._values.get(key)
        found = None if kept is None else kept()
        if found is None:
            found = _Gather.apply(shards, placements, dtype)
            self._values[key] = weakref.ref(found)
            if tuple(placements) == tuple(shards.placements):
                return found
            local = found.to_local()
            self._sources[storage_key(local)] = _Gathered(
                shards,
                version_of(shards),
                placements,
                dtype,
                StorageWeakRef(local.untyped_storage()),
            )
        return found

    @contextlib.contextmanager
    def saved_as_shards(self) -> Iterator[None]:
        """A context in which autograd keeps no gathered weight."""
        with torch.autograd.graph.saved_tensors_hooks(self._packed, _unpacked):
            yield

    def _packed(self, tensor: torch.Tensor) -> Any:
        source = self._source_of(tensor)
        if source is None:
            return tensor, version_of(tensor)
        assert isinstance(tensor, DTensor)
        local = tensor.to_local()
        return _View(
            source,
            tensor.shape,
            tensor.stride(),
            (local.shape, local.stride(), int(local.storage_offset())),
            tensor.device_mesh,
            tensor.placements,
        )

    @torch.no_grad()
    def _source_of(self, tensor: torch.Tensor) -> _Gathered | None:
        """The weight that a tensor shares memory with; None for all others."""
        if not isinstance(tensor, DTensor):
            return None
        source = self._sources.get(storage_key(tensor.to_local()))
        # Another tensor may be where a weight was.
        return None if source is None or source.memory.expired() else source


def _unpacked(packed: Any) -> torch.Tensor:
    if isinstance(packed, _View):
        return packed.again()
    tensor, version = packed
    if version_of(tensor) != version:
        raise RuntimeError(
            "A tensor that the backward pass needs was modified in place after the "
            f"operation that saved it: shape {tuple(tensor.shape)}, {tensor.dtype}."
        )
    return tensor
