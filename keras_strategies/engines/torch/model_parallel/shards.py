"""Tensors in shards, and the shards of tensors."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from keras_strategies.engines.torch.compat import shards_like, spec_of


@dataclass(frozen=True)
class ShardLayout:
    """How a tensor is divided into shards, one for each process.

    Args:
        dim: the dimension along which it is.
        count: the number of shards.
        shape: the shape of the tensor.
    """

    dim: int
    count: int
    shape: tuple[int, ...]

    @functools.cached_property
    def own_shape(self) -> tuple[int, ...]:
        """The shape of a shard."""
        own = self.shape[self.dim] // self.count
        return (*self.shape[: self.dim], own, *self.shape[self.dim + 1 :])

    @functools.cached_property
    def size(self) -> int:
        """int, the numbers of a shard."""
        return math.prod(self.own_shape)

    def split(self, shards: torch.Tensor) -> torch.Tensor:
        """A view of shards, of shape `(shards, numbers)`, as those of the tensor.

        Its dimensions are those of the tensor, with one for shards before `dim`.
        """
        return shards.view(self.count, *self.own_shape).movedim(0, self.dim)

    def joined(self, shards: torch.Tensor) -> torch.Tensor:
        """The tensor of shards, of shape `(shards, numbers)`."""
        return self.split(shards).reshape(self.shape)

    def shard_of(self, full: torch.Tensor, number: int) -> torch.Tensor:
        """A view of a shard of the tensor."""
        own = self.own_shape[self.dim]
        return full.narrow(self.dim, number * own, own)


def layout_of(raw: Any) -> ShardLayout:
    """The layout of a tensor in shards."""
    return _layout_of(spec_of(raw))


@functools.lru_cache(maxsize=2**14)
def _layout_of(spec: Any) -> ShardLayout:
    [placement] = spec.placements
    return ShardLayout(placement.dim, spec.mesh.size(), tuple(spec.shape))


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
