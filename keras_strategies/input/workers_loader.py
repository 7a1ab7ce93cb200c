"""A distributed `DataLoader`: workers compare what its reads change."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from keras_strategies.communication.communicator import Communicator
from keras_strategies.communication.replica_counts import ReplicaCounts
from keras_strategies.input.arrays import Ranges
from keras_strategies.input.batches import rows_of
from keras_strategies.input.sources import LoaderSource, Source
from keras_strategies.runtime.row_splits import replica_ranges
from keras_strategies.runtime.worker_batch import WorkerBatch, WorkerRows

_streams = itertools.count()


class WorkersLoaderSource(Source):
    """A `DataLoader` of which each worker reads its own rows, until a read draws.

    Nothing says whether reading a row of a user's dataset changes random numbers, so
    the workers compare after each batch, as in `fit`.

    Args:
        loader: the source of a loader that `loader_rows.can_read_rows`.
        workers: the workers, which stay the same.
    """

    # Generators of the process are compared, which other threads draw from.
    is_read_in_turn = True

    def __init__(self, loader: LoaderSource, workers: Communicator):
        super().__init__(loader.given)
        from keras_strategies.engines.torch.own_rows.loader_rows import LoaderRows

        self.loader = loader
        rows = WorkerRows(lambda: workers.replica_counts)
        self._rows = LoaderRows(loader.given, workers, rows)
        self.own_batches = self._compared_batches
        self._spec: Any = None
        # A pass of which this worker has read the first batch, with all rows.
        self._begun: Iterator[Any] | None = None

    def _compared_batches(self, counts: ReplicaCounts) -> Iterator[tuple[Any, Ranges]]:
        # Programs read passes on threads of their own: each needs a stream.
        stream = f"loader {next(_streams)}"
        batches, self._begun = self._begun, None
        if batches is None:
            batches = self._rows.begin(stream)
        else:
            self._rows.read_before(stream)
        for batch in batches:
            if isinstance(batch, WorkerBatch) and batch.every:
                ranges = replica_ranges(sum(batch.every), counts)
                first = ranges[0][0]
                yield batch.batch, [(a - first, b - first) for a, b in ranges]
                continue
            if isinstance(batch, WorkerBatch):
                batch = batch.batch
            yield batch, replica_ranges(rows_of(batch), counts)

    def read(self) -> Iterator[Any]:
        return self.loader.read()

    @property
    def cardinality(self) -> int | None:
        return self.loader.cardinality

    def spec(self) -> Any:
        # Once: workers read all rows of a pass of which the first batch was read here.
        if self._spec is None:
            self._spec = self._spec_of_first_batch()
            self._begun, self._peeked = self._peeked, None
        return self._spec

    def model_input(self, class_weight: dict[int, float] | None = None) -> Any:
        return self.loader.model_input(class_weight)
