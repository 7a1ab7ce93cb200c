"""A global batch of which this worker has its own rows."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from keras_strategies.communication.replica_counts import ReplicaCounts
from keras_strategies.keras_compat.models.input_adapters import OwnPart
from keras_strategies.runtime.row_splits import split_sizes
from keras_strategies.values import map_structure

if TYPE_CHECKING:
    from keras_strategies.communication.communicator import Communicator
    from keras_strategies.runtime.drivers import FitDriver
    from keras_strategies.runtime.engine import StrategyCore


@dataclass(frozen=True)
class WorkerBatch(OwnPart):
    """This worker's rows of a global batch, which follow those of the worker before it.

    Args:
        batch: structure of arrays or tensors on the host with these rows.
        every: list of int, the rows of each replica, of all workers in order; empty if
            each worker has all rows.
        counts: the replicas for which `WorkerRows` has read it; None for rows that each
            worker has by itself.
        again: reads this worker's rows in the group of workers at that time; None for
            batches that cannot be read again.
        order: pair of int, the rows of the global batch, and a checksum of their
            numbers in the dataset, which steps compare; None where rows have no
            numbers.
    """

    batch: Any
    every: list[int]
    counts: ReplicaCounts | None = None
    again: Callable[[], WorkerBatch] | None = None
    order: tuple[int, int] | None = None

    def of(self, counts: ReplicaCounts) -> WorkerBatch:
        """The batch with this worker's rows in a group of workers.

        Args:
            counts: the replicas of the current group.
        """
        if self.again is None or self.counts == counts:
            return self
        return self.again()

    def changed(self, change: Callable[[Any], Any]) -> WorkerBatch:
        """The batch with what `change` makes of its rows, also of those read again."""
        again = self.again
        return dataclasses.replace(
            self,
            batch=change(self.batch),
            again=None if again is None else lambda: again().changed(change),
        )


class WorkerRows:
    """Reads the rows of this worker, in the group of workers at that time.

    Args:
        counts: returns the replicas of the workers.
        split: see `FitDriver.split_rows`.
        needs_few: see `FitDriver.needs_few_rows`.
    """

    def __init__(
        self,
        counts: Callable[[], ReplicaCounts],
        split: Callable[[int, int], list[int]] = split_sizes,
        needs_few: bool = False,
    ):
        self._counts = counts
        self._split = split
        self._needs_few = needs_few

    @classmethod
    def by(cls, driver: FitDriver, workers: Communicator) -> WorkerRows:
        """The rows that a driver of `fit` needs on this worker."""
        return cls(
            lambda: workers.replica_counts, driver.split_rows, driver.needs_few_rows
        )

    def sizes(self, rows: int) -> list[int]:
        """The rows of each replica, of all workers, of a global batch."""
        return self._split(rows, self._counts().total)

    def range_of(self, rows: int) -> tuple[int, int]:
        """The first row of this worker, and the one after its last.

        All rows of a batch of which a worker has none, or a replica that needs one.

        Args:
            rows: int, those of the global batch.
        """
        counts = self._counts()
        every = self._split(rows, counts.total)
        own = [sum(each) for each in counts.split(every)]
        if not all(every if self._needs_few else own):
            return 0, rows
        start = sum(own[: counts.worker])
        return start, start + own[counts.worker]

    def read(self, rows: int, read: Callable[[int, int], Any]) -> WorkerBatch:
        """The rows of this worker.

        Args:
            rows: int, those of the global batch.
            read: callable of the first row and of the row after the last one, more than
                the first, that returns a structure of arrays with these rows.
        """
        counts = self._counts()
        every = self._split(rows, counts.total)
        own = [sum(each) for each in counts.split(every)]
        start = sum(own[: counts.worker])
        stop = start + own[counts.worker]
        if self._needs_few and 0 in every:
            start, stop = 0, rows
        # A row of a batch of which it has none, for the structure.
        first = min(start, rows - 1) if start == stop else start
        found = read(first, max(stop, first + 1))
        batch = found
        if start == stop:
            batch = map_structure(
                lambda leaf: None if leaf is None else leaf[:0], found
            )
        return WorkerBatch(batch, every, counts)

    def __getstate__(self) -> dict[str, Any]:
        # Processes of a dataset have the group of the time at which they start.
        return {**vars(self), "_counts": functools.partial(_same, self._counts())}


def _without_rows(leaf: Any) -> Any:
    return None if leaf is None else leaf[:0]


def _same(counts: ReplicaCounts) -> ReplicaCounts:
    return counts


def own_rows_of(strategy: StrategyCore | None) -> WorkerRows | None:
    """How each worker of a strategy reads its rows; None where all rows are read."""
    workers = None if strategy is None else strategy.workers
    if workers is None or workers.replica_counts.span > 1:
        return None
    assert strategy is not None
    return WorkerRows.by(strategy.drivers.fit, workers)
