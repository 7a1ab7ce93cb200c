"""Placement of a variable's shards on the servers."""

from __future__ import annotations

import itertools

from keras_strategies.parameter_server.variables.variable_partitioners import (
    PartitionFunction,
    number_of_parts,
    split_rows,
)
from keras_strategies.parameter_server.wire.variable_description import ShardRange


class RoundRobinPlacement:
    """Places each new shard on the next server.

    Args:
        servers: int, number of servers.
        partitioner: number of shards of a variable; None for one.

    Example:

    >>> placement = RoundRobinPlacement(2, FixedShardsPartitioner(3))
    >>> placement.place((4, 8), "float32")
    (ShardRange(server=0, start=0, stop=2), ShardRange(server=1, start=2, stop=3),
     ShardRange(server=0, start=3, stop=4))
    """

    def __init__(self, servers: int, partitioner: PartitionFunction | None = None):
        self._partitioner = partitioner
        self._next = itertools.cycle(range(servers))

    def place(self, shape: tuple[int, ...], dtype: str) -> tuple[ShardRange, ...]:
        """The shards of a new variable.

        Args:
            shape: tuple of int.
            dtype: str.
        """
        shards = number_of_parts(self._partitioner, shape, dtype)
        rows = shape[0] if shape else 1
        return tuple(
            ShardRange(next(self._next), start, stop)
            for start, stop in split_rows(rows, shards)
        )
