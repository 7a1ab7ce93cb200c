"""Input pipelines: their files, parts of workers, and iterators."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.data.experimental.ops import distribute

from keras_strategies.keras_compat.private_names import Private

_PYTHON = "tensorflow.python"

PRIVATE_NAMES = (
    Private(
        f"{_PYTHON}.data.experimental.ops.distribute",
        ("_AutoShardDataset", "compute_batch_size"),
        "Workers read separate files, as with `experimental_distribute_dataset`.",
    ),
    Private(
        "tensorflow.data.Dataset",
        ("_functions", "_inputs"),
        "The readers of an input pipeline, and whether it calls functions.",
    ),
    Private(
        f"{_PYTHON}.data.ops.shuffle_op._ShuffleDataset",
        ("_seed", "_seed2"),
        "Pipelines with an order that cannot be repeated.",
    ),
    Private(
        f"{_PYTHON}.data.ops.readers.TFRecordDatasetV2",
        ("_filenames",),
        "The files of a reader.",
    ),
    Private(
        f"{_PYTHON}.data.ops.iterator_ops.OwnedIterator",
        ("_iterator_resource", "_type_spec"),
        "Iterators that are created when they are read.",
    ),
)


def read_by_worker(dataset: tf.data.Dataset, workers: int, index: int) -> Any:
    """Part of a dataset for one of several workers, by the policy in its options."""
    return distribute._AutoShardDataset(dataset, workers, index)


def static_batch_size(dataset: tf.data.Dataset) -> int:
    """The rows of a dataset's batches; -1 if unknown."""
    return int(distribute.compute_batch_size(dataset))


def file_readers(dataset: tf.data.Dataset) -> Iterator[Any]:
    """The files, a tensor or a dataset, of each reader of an input pipeline.

    Readers inside of `interleave` or `flat_map` are not found.
    """
    for each in _pipeline(dataset):
        files = getattr(each, "_filenames", None)
        if files is not None:
            yield files


def calls_functions(dataset: tf.data.Dataset) -> bool:
    """Whether an input pipeline calls functions, such as that of a `map`."""
    return any(each._functions() for each in _pipeline(dataset))


def shuffles_without_seed(dataset: tf.data.Dataset) -> bool:
    """Whether an input pipeline shuffles in a different order in each process."""
    return any(
        hasattr(each, "_seed2") and not int(each._seed) and not int(each._seed2)
        for each in _pipeline(dataset)
    )


def indices_and_arrays(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """The order of a dataset that Keras has made from arrays.

    Keras 3.15: `ArrayDataAdapter.get_tf_dataset` zips the indices of each batch with
    the arrays, and takes the rows from them.

    Returns:
        A dataset of pairs: the indices of a global batch, and the arrays.
    """
    zipped = type(tf.data.Dataset.zip(tf.data.Dataset.range(1)))
    return next(each for each in _pipeline(dataset) if isinstance(each, zipped))


def _pipeline(dataset: tf.data.Dataset) -> Iterator[Any]:
    """A dataset and all of its input datasets."""
    remaining = [dataset]
    while remaining:
        each = remaining.pop()
        remaining += each._inputs()
        yield each


class LazyIterator(tf.data.Iterator):  # type: ignore[misc]
    """An iterator of a dataset that TensorFlow creates when it is first read.

    It may be passed to a `tf.function`, as others.

    Args:
        create: returns the iterator.
        element_spec: returns the structure of its specifications.
        used: an object that exists as long as this iterator.
    """

    def __init__(
        self,
        create: Callable[[], tf.data.Iterator],
        element_spec: Callable[[], Any],
        used: Any = None,
    ):
        self._create = create
        self._element_spec = element_spec
        self._used = used

    @functools.cached_property
    def _iterator(self) -> tf.data.Iterator:
        return self._create()

    @property
    def element_spec(self) -> Any:
        return self._element_spec()

    def get_next(self) -> Any:
        return self._iterator.get_next()

    def get_next_as_optional(self) -> Any:
        return self._iterator.get_next_as_optional()

    def __next__(self) -> Any:
        return next(self._iterator)

    @property
    def _type_spec(self) -> Any:
        return self._iterator._type_spec

    @property
    def _iterator_resource(self) -> Any:
        return self._iterator._iterator_resource


def handle_of(iterator: tf.data.Iterator) -> tf.Tensor:
    """A string with which functions of a dataset read an iterator."""
    resource = iterator._iterator_resource
    return tf.raw_ops.IteratorToStringHandle(resource_handle=resource)


def iterator_of(handle: tf.Tensor, dataset: tf.data.Dataset) -> tf.data.Iterator:
    """The iterator of a handle, in a function of a dataset."""
    types, shapes, classes = (
        get(dataset)
        for get in (
            tf.compat.v1.data.get_output_types,
            tf.compat.v1.data.get_output_shapes,
            tf.compat.v1.data.get_output_classes,
        )
    )
    return tf.compat.v1.data.Iterator.from_string_handle(handle, types, shapes, classes)
