"""Datasets with batches that each worker reads its own rows of."""

from __future__ import annotations

import abc
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import keras

from keras_strategies.communication.communicator import Communicator
from keras_strategies.communication.replica_counts import ReplicaCounts
from keras_strategies.communication.worker_steps import compare_rows
from keras_strategies.errors import WorkerError
from keras_strategies.input.arrays import Ranges
from keras_strategies.input.batches import as_numpy
from keras_strategies.keras_compat.models.row_adapters import own_rows_adapter
from keras_strategies.runtime.drivers import FitDriver
from keras_strategies.runtime.row_splits import replica_ranges, split_sizes
from keras_strategies.runtime.worker_batch import WorkerBatch

_streams = itertools.count()


class RowDataset(keras.utils.PyDataset, abc.ABC):
    """A `keras.utils.PyDataset` with batches that can be read by rows.

    Several workers of `MultiWorkerMirroredStrategy` or `ModelParallelStrategy` read
    their own rows of each global batch only, where a `PyDataset` is read in full by
    each. A row must depend on its place in its batch alone: not on the rows beside it,
    nor on generators of random numbers that a row before it has advanced. Batches and
    their order are those of one device.

    Subclasses have `__len__`, or `num_batches`, and the two methods below.

    Args:
        workers, use_multiprocessing, max_queue_size: see `keras.utils.PyDataset`.

    Example:

    >>> import numpy as np
    >>> class Squares(ks.RowDataset):
    ...     def __len__(self):
    ...         return 3
    ...
    ...     def num_rows(self, index):
    ...         return 4
    ...
    ...     def get_rows(self, index, start, stop):
    ...         x = 4 * index + np.arange(start, stop)[:, None]
    ...         return x, x**2
    >>> x, y = Squares()[2]
    >>> y.tolist()
    [[64], [81], [100], [121]]
    """

    @abc.abstractmethod
    def num_rows(self, index: int) -> int:
        """The number of rows of a batch.

        Args:
            index: int, the number of the batch.
        """

    @abc.abstractmethod
    def get_rows(self, index: int, start: int, stop: int) -> Any:
        """Rows of a batch.

        Args:
            index: int, the number of the batch.
            start: int, the first row.
            stop: int, the row after the last one, more than `start`.

        Returns:
            The rows `start` to `stop` of what `__getitem__` returns: `(x,)`, `(x, y)`
            or `(x, y, sample_weight)`, structures of arrays of shape
            `(stop - start, ...)`.
        """

    def __getitem__(self, index: int) -> Any:
        return self.get_rows(index, 0, self.num_rows(index))


class _OwnRows(keras.utils.PyDataset):
    """The batches of a dataset with this worker's rows, as `WorkerBatch`.

    Threads and processes of the dataset read it.

    Args:
        dataset: the dataset.
        counts: the replicas of the workers.
        split: see `FitDriver.split_rows`.
        needs_few: see `FitDriver.needs_few_rows`.
    """

    def __init__(
        self,
        dataset: RowDataset,
        counts: ReplicaCounts,
        split: Callable[[int, int], list[int]],
        needs_few: bool,
    ):
        super().__init__(
            dataset.workers, dataset.use_multiprocessing, dataset.max_queue_size
        )
        self._dataset = dataset
        self._counts = counts
        self._split = split
        self._needs_few = needs_few

    @property
    def num_batches(self) -> int | None:
        """int, the length of a pass; None if it has no end."""
        return self._dataset.num_batches

    def on_epoch_begin(self) -> None:
        """See `keras.utils.PyDataset`."""
        self._dataset.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """See `keras.utils.PyDataset`."""
        self._dataset.on_epoch_end()

    def __getitem__(self, index: int) -> WorkerBatch:
        rows = int(self._dataset.num_rows(index))
        every = self._split(rows, self._counts.total)
        own = [sum(each) for each in self._counts.split(every)]
        start = sum(own[: self._counts.worker])
        stop = start + own[self._counts.worker]
        if self._needs_few and 0 in every:
            start, stop = 0, rows
        # A row of a batch of which it has none, for the structure.
        first = min(start, rows - 1) if start == stop else start
        batch = self._dataset.get_rows(index, first, max(stop, first + 1))
        arrays = keras.tree.map_structure(
            lambda leaf: as_numpy(leaf)[: stop - start], batch, none_is_leaf=False
        )
        return WorkerBatch(arrays, every)


def batches_of_worker(
    dataset: RowDataset, counts: ReplicaCounts
) -> Iterator[tuple[Any, Ranges]]:
    """Own rows of each batch, and those of them that each local replica takes.

    Args:
        dataset: the dataset.
        counts: the replicas of all workers.
    """
    own = _OwnRows(dataset, counts, split_sizes, needs_few=False)
    adapter = own_rows_adapter(own, False, None, lambda batches, _: batches)
    adapter.on_epoch_begin()
    try:
        for batch, rows in adapter.batches_and_rows():
            ranges = replica_ranges(rows, counts)
            first = ranges[0][0]
            yield batch, [(a - first, b - first) for a, b in ranges]
    finally:
        adapter.on_epoch_end()


def own_rows(
    dataset: RowDataset,
    workers: Communicator,
    driver: FitDriver,
    shuffle: bool,
    class_weight: dict[int, float] | None,
) -> Any:
    """The input of Keras's `fit`, `evaluate` and `predict`, with this worker's rows.

    Args:
        dataset: the dataset.
        workers: the workers.
        driver: the driver of `fit`, which determines the rows of each worker.
        shuffle: bool, whether the order of batches is shuffled.
        class_weight: dict, as for `fit`.
    """
    counts = workers.group.gather_values("the number of batches", dataset.num_batches)
    if len(set(counts)) > 1:
        raise WorkerError(
            f"Workers have datasets of different lengths: {counts} batches. All "
            "workers must read the same global batches."
        )
    split, needs_few = driver.split_rows, driver.needs_few_rows
    own = _OwnRows(dataset, workers.replica_counts, split, needs_few)

    def compared(batches: Iterator[Any], rows_of: Callable[[Any], int]) -> Any:
        # Passes may be read on separate threads: each needs a stream.
        stream = f"rows {next(_streams)}"
        for batch in batches:
            rows = rows_of(batch)
            compare_rows(rows, workers.group.gather_values("a batch", rows, stream))
            yield batch

    return own_rows_adapter(own, shuffle, class_weight, compared)
