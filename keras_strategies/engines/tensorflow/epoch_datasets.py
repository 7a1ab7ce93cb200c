"""Datasets that the epochs of `fit`, `evaluate` and `predict` read.

With input of a known length, Keras makes an iterator at the end of each epoch, and
another one when the next epoch begins. An iterator of `tf.data` draws the seeds of
`shuffle` when it is made, so the order of the rows depends on how many were made, and
when.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_strategies.engines.tensorflow.compat.datasets import (
    LazyIterator,
    handle_of,
    iterator_of,
)

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
    """

    def __init__(self, device: str | None):
        self._device = device

    def dataset(
        self, dataset: Any, by_user: bool, begin: Callable[[], None] | None = None
    ) -> Any:
        """The dataset to iterate over, in the order that it has without a strategy.

        A dataset with strings, sparse or ragged tensors stays on the host.

        Args:
            dataset: `tf.data.Dataset`; others are returned unchanged.
            by_user: bool, whether the user made it, and chose its options; if not,
                Keras made it from arrays, a generator or a `PyDataset`.
            begin: called when Keras makes an iterator; None for nothing.
        """
        if not isinstance(dataset, tf.data.Dataset):
            return dataset
        ahead = self._device is not None and _is_movable(dataset)
        if by_user:
            return _UsersEpochs(dataset, self._device) if ahead else dataset
        options = tf.data.Options()
        options.autotune.enabled = False
        dataset = dataset.with_options(options)
        if ahead:
            dataset = _prefetched(dataset, self._device)
        return Epochs(dataset, begin)


class Epochs:
    """A dataset of Keras's, with iterators that are made when they are read.

    Keras discards the iterator that it makes at the end of an epoch, in most cases, and
    the creation of one takes 2 ms for each function of the dataset. Those of Keras's
    datasets draw nothing when they are made: arrays are shuffled when they are read.

    Args:
        dataset: the dataset.
        begin: called when Keras makes an iterator; None for nothing.
    """

    def __init__(self, dataset: tf.data.Dataset, begin: Callable[[], None] | None):
        self.dataset = dataset
        self.element_spec = dataset.element_spec
        self._begin = begin

    def __iter__(self) -> tf.data.Iterator:
        if self._begin is not None:
            self._begin()
        return LazyIterator(lambda: iter(self.dataset), self.element_spec)


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
        handles = tf.data.Dataset.range(1).map(lambda _: self._handle.read_value())
        self._prefetched = _prefetched(handles.flat_map(self._batches_of), device)

    def __iter__(self) -> tf.data.Iterator:
        batches = iter(self.dataset)

        def prefetched() -> tf.data.Iterator:
            self._handle.assign(handle_of(batches))
            return iter(self._prefetched)

        return LazyIterator(prefetched, self.element_spec, batches)

    def _batches_of(self, handle: Any) -> tf.data.Dataset:
        def following(_: Any) -> Any:
            return iterator_of(handle, self.dataset).get_next_as_optional()

        batches = tf.data.Dataset.range(tf.int64.max).map(following)
        batches = batches.take_while(lambda batch: batch.has_value())
        return batches.map(lambda batch: batch.get_value())


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
