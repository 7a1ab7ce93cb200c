"""Which devices of a mesh have which shard of a variable, without a framework."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from keras_strategies.layouts import Axes, VariableMesh


@dataclass(frozen=True)
class ShardGrid:
    """The shards of a variable, in the order of a row-major array.

    Args:
        parts: tuple of int, for each axis of the variable the number of shards.
        holders: for each shard the numbers of the mesh's devices that have it, among
            those of this process or of all.
        coordinates: for each device its position along each axis of the mesh.
    """

    parts: tuple[int, ...]
    holders: tuple[tuple[int, ...], ...]
    coordinates: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, mesh: VariableMesh, axes: Axes, rank: int) -> ShardGrid:
        """The shards of a variable of `rank` axes with a layout.

        >>> devices = tuple(Device("cpu", i) for i in range(4))
        >>> mesh = VariableMesh((2, 2), ("batch", "model"), devices, rule)
        >>> grid = ShardGrid.of(mesh, (None, "model"), rank=2)
        >>> grid.parts, grid.holders
        ((1, 2), ((0, 2), (1, 3)))
        """
        full = (*axes, *[None] * (rank - len(axes)))
        parts = tuple(mesh.sizes[axis] if axis else 1 for axis in full)
        coordinates = tuple(itertools.product(*map(range, mesh.shape)))
        holders: dict[tuple[int, ...], list[int]] = {
            shard: [] for shard in itertools.product(*map(range, parts))
        }
        for number, place in enumerate(coordinates):
            along = dict(zip(mesh.axes, place, strict=True))
            shard = tuple(along[axis] if axis else 0 for axis in full)
            holders[shard].append(number)
        return cls(parts, tuple(map(tuple, holders.values())), coordinates)

    @property
    def count(self) -> int:
        """int, the number of different shards."""
        return math.prod(self.parts)

    @property
    def columns(self) -> ShardGrid:
        """The same without the split of the first axis."""
        return replace(self, parts=(1, *self.parts[1:]))

    def within(self, first: int, count: int) -> ShardGrid:
        """The same, with those of the devices that have the numbers from `first` on."""
        own = range(first, first + count)
        holders = [tuple(i for i in each if i in own) for each in self.holders]
        return replace(self, holders=tuple(holders))

    @property
    def is_complete(self) -> bool:
        """Whether each shard is on a device."""
        return all(self.holders)

    def nearest(self, shard: int, device: int) -> int:
        """The device that another one reads a shard from: that of its row, if any."""

        def distance(holder: int) -> int:
            pairs = zip(self.coordinates[holder], self.coordinates[device], strict=True)
            return sum(a != b for a, b in pairs)

        return min(self.holders[shard], key=distance)

    def split(
        self, value: Any, split: Callable[[Any, int, int], Sequence[Any]]
    ) -> list[Any]:
        """The shards of a value.

        Args:
            value: tensor of the variable's shape.
            split: callable of a tensor, the number of equal parts and the axis.
        """
        shards = [value]
        for axis, count in enumerate(self.parts):
            if count > 1:
                shards = [
                    part for shard in shards for part in split(shard, count, axis)
                ]
        return shards

    def join(
        self, shards: Sequence[Any], concatenate: Callable[[list[Any], int], Any]
    ) -> Any:
        """The value of shards.

        Args:
            shards: tensors.
            concatenate: callable of a list of tensors and the axis.
        """
        found = list(shards)
        for axis, count in reversed(list(enumerate(self.parts))):
            if count > 1:
                found = [
                    concatenate(found[i : i + count], axis)
                    for i in range(0, len(found), count)
                ]
        [value] = found
        return value
