"""Datasets that the epochs of `fit`, `evaluate` and `predict` read.

With input of a known length, Keras makes an iterator at the end of each epoch, and
another one when the next epoch begins. An iterator of `tf.data` draws the seeds of
`shuffle` when it is made, so the order of the rows depends on how many were made, and
when.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from keras_strategies.communication.replica_counts import ReplicaCounts
from keras_strategies.engines.tensorflow.compat.datasets import (
    LazyIterator,
    handle_of,
    indices_and_arrays,
    iterator_of,
)
from keras_strategies.keras_compat.models.input_adapters import RowsOfWorker, own_part
from keras_strategies.runtime.row_splits import split_sizes
from keras_strategies.runtime.worker_batch import WorkerBatch, WorkerRows

# Batches on the device, or being transferred, besides the one in use.
_AHEAD = 1


class EpochDatasets:
    """Prefetch to a device, and options of the datasets that Keras makes.

    Keras's datasets are read without autotuning. The tuning thread of an iterator wakes
    10, 30, 70, ..., 10 * (2**k - 1) ms after its start, and TensorFlow destroys the
    iterator, at the end of an epoch, only when it wakes: an epoch may take twice as
    long. Parallel calls have the default parallelism, and prefetch buffers grow with
    demand, with and without autotuning.

    Args:
        device: as TensorFlow names it, `/device:KIND:INDEX`; None leaves batches on
            the host.
        counts: the replicas of the workers, of which each reads its rows of arrays;
            None to read all rows.
        changing: the rows of a worker whose group may change; None for others.
    """

    def __init__(
        self,
        device: str | None,
        counts: ReplicaCounts | None = None,
        changing: WorkerRows | None = None,
    ):
        self._device = device
        self._counts = counts
        self._changing = changing

    def dataset(
        self,
        dataset: Any,
        by_user: bool,
        begin: Callable[[], None] | None = None,
        of_arrays: bool = False,
        own: Callable[[], Iterator[Any]] | None = None,
        is_read_by_steps: bool = False,
    ) -> Any:
        """The dataset to iterate over, in the order that it has without a strategy.

        A dataset with strings, sparse or ragged tensors stays on the host.

        Args:
            dataset: `tf.data.Dataset`; others are returned unchanged.
            by_user: bool, whether the user made it, and chose its options; if not,
                Keras made it from arrays, a generator or a `PyDataset`.
            begin: called when Keras makes an iterator; None for nothing.
            of_arrays: bool, whether Keras made it from arrays.
            own: starts a pass of `WorkerBatch` in its place; None for other input.
            is_read_by_steps: bool, whether steps read `own`, also where the group of
                workers does not change.
        """
        if not isinstance(dataset, tf.data.Dataset):
            return dataset
        if own is not None and (is_read_by_steps or self._changing is not None):
            spec = own_part(dataset.element_spec)
            return Epochs(OwnBatches(own, spec), begin)
        if by_user:
            ahead = self._device is not None and _is_movable(dataset)
            return _UsersEpochs(dataset, self._device) if ahead else dataset
        rows = None
        if of_arrays and _is_movable(dataset):
            rows = self._own_rows(dataset)
        return Epochs(self._of_keras(dataset), begin, rows)

    def _own_rows(self, dataset: tf.data.Dataset) -> Any:
        """The dataset of own rows of arrays; None to read all rows."""
        if self._changing is not None:
            pairs = _without_tuning(indices_and_arrays(dataset))
            read = functools.partial(_own_batches, pairs, self._changing)
            return OwnBatches(read, dataset.element_spec)
        if self._counts is not None:
            return self._of_keras(rows_of_worker(dataset, self._counts))
        return None

    def _of_keras(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        dataset = _without_tuning(dataset)
        if self._device is not None and _is_movable(dataset):
            dataset = _prefetched(dataset, self._device)
        return dataset


class Epochs:
    """A dataset of Keras's, with iterators that are made when they are read.

    Keras discards the iterator that it makes at the end of an epoch, in most cases, and
    the creation of one takes 2 ms for each function of the dataset. Those of Keras's
    datasets draw nothing when they are made: arrays are shuffled when they are read.

    Args:
        dataset: the dataset.
        begin: called when Keras makes an iterator; None for nothing.
        own: the same batches with this worker's rows; None where all rows are read.

    Attributes:
        reads_all: bool, whether epochs that follow read all rows.
    """

    def __init__(
        self,
        dataset: tf.data.Dataset | OwnBatches,
        begin: Callable[[], None] | None,
        own: tf.data.Dataset | OwnBatches | None = None,
    ):
        self._every = dataset
        self._begin = begin
        self._own = own
        self.reads_all = False

    @property
    def dataset(self) -> Any:
        """The dataset that an epoch reads."""
        is_own = self._own is not None and not self.reads_all
        return self._own if is_own else self._every

    @property
    def element_spec(self) -> Any:
        """The specification of its elements."""
        return self.dataset.element_spec

    def __iter__(self) -> tf.data.Iterator:
        if self._begin is not None:
            self._begin()
        return EpochIterator(self)


class OwnBatches:
    """Batches that steps read: an elastic worker again, if its group changes.

    Args:
        begin: starts a pass of `WorkerBatch`.
        element_spec: the specification of the global batches.
    """

    def __init__(self, begin: Callable[[], Iterator[Any]], element_spec: Any):
        self._begin = begin
        self.element_spec = element_spec

    def __iter__(self) -> Iterator[Any]:
        return self._begin()


def _own_batches(pairs: tf.data.Dataset, rows: WorkerRows) -> Iterator[WorkerBatch]:
    """A pass over arrays.

    Args:
        pairs: the indices of each global batch, and the arrays.
        rows: those of this worker.
    """
    for indices, arrays in pairs:
        yield _own_batch(indices, arrays, rows)


def _own_batch(indices: Any, arrays: Any, rows: WorkerRows) -> WorkerBatch:
    def read(start: int, stop: int) -> Any:
        with tf.device("/device:CPU:0"):
            return keras.tree.map_structure(
                lambda array: tf.gather(array, indices[start:stop]),
                arrays,
                none_is_leaf=False,
            )

    again = functools.partial(_own_batch, indices, arrays, rows)
    return dataclasses.replace(rows.read(int(indices.shape[0]), read), again=again)


class EpochIterator(LazyIterator):
    """The iterator of an epoch.

    Args:
        epochs: its epochs, which determine until it is read which rows it has.
    """

    def __init__(self, epochs: Epochs):
        # Without a reference to itself, so that arrays of datasets do not stay until
        # garbage is collected.
        @functools.cache
        def dataset() -> tf.data.Dataset:
            return epochs.dataset

        super().__init__(lambda: iter(dataset()), lambda: dataset().element_spec)
        self.epochs = epochs


class _UsersEpochs:
    """A user's dataset with prefetch to a device.

    Prefetch makes the iterator of its dataset when the first batch is read. Here Keras
    makes it, and the prefetching dataset, which exists once, reads it by its handle.

    Args:
        dataset: the user's.
        device: as TensorFlow names it.
    """

    def __init__(self, dataset: tf.data.Dataset, device: str | None):
        self.dataset = dataset
        self.element_spec = dataset.element_spec
        with tf.device("/device:CPU:0"):
            self._handle = tf.Variable("", trainable=False)
        handle = self._handle
        handles = tf.data.Dataset.range(1).map(lambda _: handle.read_value())
        batches_of = functools.partial(_batches_of, dataset)
        self._prefetched = _prefetched(handles.flat_map(batches_of), device)

    def __iter__(self) -> tf.data.Iterator:
        batches = iter(self.dataset)

        def prefetched() -> tf.data.Iterator:
            self._handle.assign(handle_of(batches))
            return iter(self._prefetched)

        return LazyIterator(prefetched, lambda: self.element_spec, batches)


def _batches_of(dataset: tf.data.Dataset, handle: Any) -> tf.data.Dataset:
    """The batches of the iterator of a dataset with a handle."""

    def following(_: Any) -> Any:
        return iterator_of(handle, dataset).get_next_as_optional()

    batches = tf.data.Dataset.range(tf.int64.max).map(following)
    batches = batches.take_while(lambda batch: batch.has_value())
    return batches.map(lambda batch: batch.get_value())


def rows_of_worker(dataset: tf.data.Dataset, counts: ReplicaCounts) -> tf.data.Dataset:
    """A dataset of arrays with this worker's rows of each batch, as `RowsOfWorker`.

    A batch with fewer rows than replicas has all rows.

    Args:
        dataset: the dataset that Keras has made, of dense tensors.
        counts: the replicas of the workers.
    """
    first, last, count = counts.first, counts.first + counts.count, counts.total

    def read(indices: Any, arrays: Any) -> RowsOfWorker:
        total = indices.shape[0]
        if total is None:
            total = tf.shape(indices)[0]
            rows, larger = total // count, total % count
            start = first * rows + tf.minimum(first, larger)
            stop = last * rows + tf.minimum(last, larger)
            is_split = total >= count
            start, stop = tf.where(is_split, start, 0), tf.where(is_split, stop, total)
        elif total >= count:
            bounds = [0, *itertools.accumulate(split_sizes(total, count))]
            start, stop = bounds[first], bounds[last]
        else:
            start, stop = 0, total
        own = indices[start:stop]
        batch = keras.tree.map_structure(
            lambda array: tf.gather(array, own), arrays, none_is_leaf=False
        )
        return RowsOfWorker(batch, tf.zeros([total, 0], tf.bool))

    options = tf.data.Options()
    # As Keras sets it for its own.
    options.experimental_optimization.apply_default_optimizations = False
    found = indices_and_arrays(dataset).map(read)
    return found.with_options(options).prefetch(_AHEAD)


def _without_tuning(dataset: tf.data.Dataset) -> tf.data.Dataset:
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)


def _prefetched(dataset: tf.data.Dataset, device: str | None) -> tf.data.Dataset:
    with tf.device(device):
        return dataset.apply(tf.data.experimental.prefetch_to_device(device, _AHEAD))


def _is_movable(dataset: tf.data.Dataset) -> bool:
    specs = tf.nest.flatten(dataset.element_spec)
    return all(
        isinstance(spec, tf.TensorSpec)
        and spec.dtype not in (tf.string, tf.variant, tf.resource)
        for spec in specs
    )
