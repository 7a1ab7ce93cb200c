"""Tensors in shards, and the shards of tensors."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard

from keras_strategies.engines.torch.compat import shards_like, spec_of

#: The attribute of a tensor with its layout.
_LAYOUT = "_keras_strategies_layout"


@dataclass(frozen=True)
class ShardLayout:
    """How a tensor is divided into shards.

    Args:
        axes: the axes of the mesh along which it is.
        counts: for each of them the number of shards.
        shape: that of the tensor.
        own_shape: that of a shard.
        split_shape: that of the tensor with separate dimensions for shards and their
            entries.
        order: for each dimension of `split_shape` its place in
            `(*counts, *own_shape)`.
    """

    axes: tuple[int, ...]
    counts: tuple[int, ...]
    shape: tuple[int, ...]
    own_shape: tuple[int, ...]
    split_shape: tuple[int, ...]
    order: tuple[int, ...]

    @functools.cached_property
    def count(self) -> int:
        """int, the number of shards."""
        return math.prod(self.counts)

    @functools.cached_property
    def size(self) -> int:
        """int, the numbers of a shard."""
        return math.prod(self.own_shape)

    @functools.cached_property
    def _places(self) -> tuple[int, ...]:
        """The inverse of `order`."""
        return tuple(sorted(range(len(self.order)), key=self.order.__getitem__))

    def split(self, shards: torch.Tensor) -> torch.Tensor:
        """A view of shards, of shape `(shards, numbers)`, with `split_shape`."""
        return shards.view(*self.counts, *self.own_shape).permute(self.order)

    def joined(self, shards: torch.Tensor) -> torch.Tensor:
        """The tensor of shards, of shape `(shards, numbers)`."""
        return self.split(shards).reshape(self.shape)

    def shards_of(self, full: torch.Tensor) -> torch.Tensor:
        """A view of the tensor as shards, of shape `(*counts, *own_shape)`."""
        return full.view(self.split_shape).permute(self._places)


def layout_of(raw: Any) -> ShardLayout:
    """The layout of a tensor in shards, which it keeps."""
    found: ShardLayout | None = getattr(raw, _LAYOUT, None)
    if found is None:
        found = _layout_of(spec_of(raw))
        setattr(raw, _LAYOUT, found)
    return found


@functools.lru_cache(maxsize=2**14)
def _layout_of(spec: Any) -> ShardLayout:
    mesh = spec.mesh
    dims = {
        axis: placement.dim
        for axis, placement in enumerate(spec.placements)
        if isinstance(placement, Shard) and mesh.size(axis) > 1
    }
    counts = tuple(mesh.size(axis) for axis in dims)
    shape = tuple(spec.shape)
    own_shape, split_shape, order = [], [], []
    for dim, length in enumerate(shape):
        along = [i for i, sharded in enumerate(dims.values()) if sharded == dim]
        own = length // math.prod(counts[i] for i in along)
        own_shape.append(own)
        split_shape += [*(counts[i] for i in along), own]
        order += [*along, len(counts) + dim]
    return ShardLayout(
        *(tuple(dims), counts, shape),
        *(tuple(own_shape), tuple(split_shape), tuple(order)),
    )


def is_sharded(raw: Any) -> bool:
    """Whether processes have shards of a tensor."""
    return isinstance(raw, DTensor)


def as_shards(own: torch.Tensor, like: DTensor) -> Any:
    """A `DTensor` of which each process has a shard.

    Args:
        own: the shard of this process.
        like: a tensor in shards of the same shape.
    """
    return shards_like(own.contiguous().to(like.dtype), like)
