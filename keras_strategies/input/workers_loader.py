"""A distributed `DataLoader`: workers compare the order of its batches."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from keras_strategies.communication.communicator import Communicator
from keras_strategies.communication.replica_counts import ReplicaCounts
from keras_strategies.input.arrays import Ranges
from keras_strategies.input.batches import rows_of
from keras_strategies.input.sources import LoaderSource
from keras_strategies.runtime.row_splits import replica_ranges
from keras_strategies.runtime.worker_batch import WorkerRows

_streams = itertools.count()


class WorkersLoaderSource(LoaderSource):
    """A `DataLoader` of which each worker reads its own rows.

    Args:
        given: a loader that `loader_rows.can_read_rows`.
        workers: the workers, which stay the same.
    """

    def __init__(self, given: Any, workers: Communicator):
        super().__init__(given)
        from keras_strategies.loaders.loader_rows import LoaderRows

        rows = WorkerRows(lambda: workers.replica_counts)
        self._rows = LoaderRows(given, workers, rows)
        self.own_batches = self._compared_batches

    def _compared_batches(self, counts: ReplicaCounts) -> Iterator[tuple[Any, Ranges]]:
        # Programs read passes on threads of their own: each needs a stream.
        for batch in self._rows.begin(f"loader {next(_streams)}"):
            if not batch.every:
                yield batch.batch, replica_ranges(rows_of(batch.batch), counts)
                continue
            ranges = replica_ranges(sum(batch.every), counts)
            first = ranges[0][0]
            yield batch.batch, [(a - first, b - first) for a, b in ranges]
