"""The distribution of replicas over workers."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class ReplicaCounts:
    """The numbers of replicas of all workers, seen from one of them.

    Args:
        by_worker: tuple of int, the number of replicas of each worker.
        worker: int, the number of this worker.
        span: int, the number of workers that form one replica; with several, each of
            them counts one replica, of which it has a shard.

    >>> counts = ReplicaCounts((2, 1, 3), worker=2)
    >>> counts.first, counts.count, counts.total
    (3, 3, 6)
    >>> counts = ReplicaCounts((1, 1, 1, 1), worker=3, span=2)
    >>> counts.first, counts.count, counts.total
    (1, 1, 2)
    """

    by_worker: tuple[int, ...]
    worker: int = 0
    span: int = 1

    @property
    def first(self) -> int:
        """The number of this worker's first replica among all."""
        return sum(self.by_worker[: self.worker]) // self.span

    @property
    def count(self) -> int:
        """The number of this worker's replicas."""
        return self.by_worker[self.worker]

    @property
    def total(self) -> int:
        """The number of replicas of all workers."""
        return sum(self.by_worker) // self.span

    def split(self, values: Iterable[T]) -> list[list[T]]:
        """Values of all replicas as a list for each worker.

        >>> ReplicaCounts((2, 1)).split("abc")
        [['a', 'b'], ['c']]
        """
        remaining = iter(values)
        return [list(itertools.islice(remaining, count)) for count in self.by_worker]
