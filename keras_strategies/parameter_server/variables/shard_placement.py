"""Which server keeps which rows of which variable."""

from __future__ import annotations

import itertools

from keras_strategies.parameter_server.variables.variable_partitioners import (
    PartitionFunction,
    number_of_parts,
    split_rows,
)
from keras_strategies.parameter_server.wire.variable_description import ShardRange


class RoundRobinPlacement:
    """Gives each new part to the next server.

    Args:
        servers: int, how many servers there are.
        partitioner: how variables are cut; None leaves them whole.

    Example:

    >>> places = RoundRobin(2, FixedShardsPartitioner(3))
    >>> places.place((4, 8), "float32")
    (Part(server=0, start=0, stop=2), Part(server=1, start=2, stop=3),
     Part(server=0, start=3, stop=4))
    """

    def __init__(self, servers: int, partitioner: PartitionFunction | None = None):
        self._servers = servers
        self._partitioner = partitioner
        self._next = itertools.cycle(range(servers))

    def place(self, shape: tuple[int, ...], dtype: str) -> tuple[ShardRange, ...]:
        """The parts of a new variable.

        Args:
            shape: tuple of int.
            dtype: str.
        """
        parts = number_of_parts(self._partitioner, shape, dtype)
        rows = shape[0] if shape else 1
        return tuple(
            ShardRange(next(self._next), start, stop)
            for start, stop in split_rows(rows, parts)
        )
