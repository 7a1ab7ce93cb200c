"""Per-replica values that are the shards of one array."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from keras_strategies.values import PerReplica


class ShardedValues(PerReplica):
    """Components of one shape, which are the shards of an array along its first axis.

    Programs read the array; components are made when they are read.

    Args:
        array: shape `(replicas * rows, ...)`, with a shard on each replica's device.
        part_shape: `(rows, ...)`, the shape of a component.
    """

    def __init__(self, array: jax.Array, part_shape: tuple[int, ...]):
        self.array = array
        self.part_shape = part_shape
        self._values = ()

    @property
    def values(self) -> tuple[Any, ...]:
        if not self._values:
            self._values = tuple(map(self.array.addressable_data, range(len(self))))
        return self._values

    def __len__(self) -> int:
        return self.array.shape[0] // self.part_shape[0]


class UnevenValues(PerReplica):
    """Components of the local replicas, with other numbers of rows than on others.

    Args:
        values: the components.
        rows: the number of rows of the component of each replica, of all workers.
    """

    def __init__(self, values: Sequence[Any], rows: Sequence[int]):
        super().__init__(values)
        self.rows = tuple(rows)
