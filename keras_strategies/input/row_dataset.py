"""Datasets with batches that each worker reads its own rows of."""

from __future__ import annotations

import abc
from collections.abc import Iterator
from typing import Any

import keras

from keras_strategies.communication.communicator import Communicator
from keras_strategies.communication.replica_counts import ReplicaCounts
from keras_strategies.errors import BatchError, WorkerError
from keras_strategies.input.arrays import Ranges
from keras_strategies.input.batches import as_numpy
from keras_strategies.keras_compat.models.row_adapters import own_rows_adapter
from keras_strategies.runtime.row_splits import replica_ranges
from keras_strategies.runtime.worker_batch import WorkerBatch, WorkerRows


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
    """The batches of a dataset with this worker's rows: an index and a `WorkerBatch`.

    Threads and processes of the dataset read it.

    Args:
        dataset: the dataset.
        rows: the rows of this worker.
    """

    def __init__(self, dataset: RowDataset, rows: WorkerRows):
        super().__init__(
            dataset.workers, dataset.use_multiprocessing, dataset.max_queue_size
        )
        self._dataset = dataset
        self._rows = rows

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

    def __getitem__(self, index: int) -> tuple[int, WorkerBatch]:
        def read(start: int, stop: int) -> Any:
            found = self._dataset.get_rows(index, start, stop)
            found = keras.tree.map_structure(as_numpy, found, none_is_leaf=False)
            for leaf in keras.tree.flatten(found):
                if leaf is not None and leaf.shape[:1] != (stop - start,):
                    name = type(self._dataset).__name__
                    raise BatchError(
                        f"`{name}.get_rows({index}, {start}, {stop})` must return "
                        f"{stop - start} rows, and has returned an array of shape "
                        f"{leaf.shape}. `num_rows({index})` must be the rows of "
                        "that batch."
                    )
            return found

        return index, self._rows.read(int(self._dataset.num_rows(index)), read)


def batches_of_worker(
    dataset: RowDataset, counts: ReplicaCounts
) -> Iterator[tuple[Any, Ranges]]:
    """Own rows of each batch, and those of them that each local replica takes.

    Args:
        dataset: the dataset.
        counts: the replicas of all workers.
    """
    own = _OwnRows(dataset, WorkerRows(lambda: counts))
    adapter = own_rows_adapter(own, False, None)
    adapter.on_epoch_begin()
    try:
        for each in adapter.own_batches():
            ranges = replica_ranges(sum(each.every), counts)
            first = ranges[0][0]
            yield each.batch, [(a - first, b - first) for a, b in ranges]
    finally:
        adapter.on_epoch_end()


def own_rows(
    dataset: RowDataset,
    workers: Communicator,
    rows: WorkerRows,
    shuffle: bool,
    class_weight: dict[int, float] | None,
) -> Any:
    """The input of Keras's `fit`, `evaluate` and `predict`, with this worker's rows.

    Args:
        dataset: the dataset.
        workers: the workers.
        rows: the rows of each worker.
        shuffle: bool, whether the order of batches is shuffled.
        class_weight: dict, as for `fit`.
    """
    counts = workers.gather_values("the number of batches", dataset.num_batches)
    if len(set(counts)) > 1:
        raise WorkerError(
            f"Workers have datasets of different lengths: {counts} batches. All "
            "workers must read the same global batches."
        )

    return own_rows_adapter(_OwnRows(dataset, rows), shuffle, class_weight)
