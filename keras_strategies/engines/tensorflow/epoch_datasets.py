"""Datasets that the epochs of `fit`, `evaluate` and `predict` read."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from keras_strategies.engines.tensorflow import compat

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

    def dataset(self, dataset: Any, by_user: bool) -> Any:
        """The dataset to iterate over; its iterators are created when they are read.

        A dataset with strings, sparse or ragged tensors stays on the host.

        Args:
            dataset: `tf.data.Dataset`; others are returned unchanged.
            by_user: bool, whether the user made it, and chose its options; if not,
                Keras made it from arrays, a generator or a `PyDataset`.
        """
        if not isinstance(dataset, tf.data.Dataset):
            return dataset
        if not by_user:
            options = tf.data.Options()
            options.autotune.enabled = False
            dataset = dataset.with_options(options)
        if self._device is not None and _is_movable(dataset):
            with tf.device(self._device):
                dataset = dataset.apply(
                    tf.data.experimental.prefetch_to_device(self._device, _AHEAD)
                )
        return Epochs(dataset)


class Epochs:
    """A dataset with iterators that are created when they are read.

    At the end of an epoch Keras requests an iterator that it discards in most cases;
    the creation of one takes 2 ms for each function of the dataset.
    """

    def __init__(self, dataset: tf.data.Dataset):
        self.dataset = dataset
        self.element_spec = dataset.element_spec

    def __iter__(self) -> tf.data.Iterator:
        return compat.LazyIterator(self.dataset)


def _is_movable(dataset: tf.data.Dataset) -> bool:
    specs = tf.nest.flatten(dataset.element_spec)
    return all(
        isinstance(spec, tf.TensorSpec)
        and spec.dtype not in (tf.string, tf.variant, tf.resource)
        for spec in specs
    )
