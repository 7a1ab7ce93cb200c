"""Input pipelines of `tf.data`, which models on every backend may read."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from keras_strategies.engines.tensorflow.compat.datasets import (
    calls_functions,
    file_readers,
    read_by_worker,
    shuffles_without_seed,
    static_batch_size,
)

__all__ = [
    "batch_size",
    "calls_functions",
    "count_files",
    "shard",
    "shuffles_without_seed",
]


def shard(dataset: tf.data.Dataset, policy: str, workers: int, index: int) -> Any:
    """The part of a dataset for one of several workers.

    Args:
        dataset: the dataset.
        policy: str, the name of a `tf.data.experimental.AutoShardPolicy`.
        workers: int, the number of workers.
        index: int, the number of this one.
    """
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = getattr(
        tf.data.experimental.AutoShardPolicy, policy
    )
    return read_by_worker(dataset.with_options(options), workers, index)


def batch_size(dataset: tf.data.Dataset) -> int | None:
    """The rows of a dataset's batches; None if it does not say so."""
    size = static_batch_size(dataset)
    return size if size > 0 else None


def count_files(dataset: tf.data.Dataset) -> int | None:
    """The number of files of a pipeline's readers; None if it has no readers.

    Readers inside of `interleave` or `flat_map` are not found.
    """
    counts = [
        int(
            files.cardinality()
            if isinstance(files, tf.data.Dataset)
            else tf.size(files)
        )
        for files in file_readers(dataset)
    ]
    return sum(counts) if counts else None
