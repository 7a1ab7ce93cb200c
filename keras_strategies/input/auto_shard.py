"""Auto-sharding of `tf.data` pipelines between workers.

`tf.data.Options().experimental_distribute.auto_shard_policy` defines how a dataset is
divided. For `FILE` and for `HINT`, with `tf.data.experimental.SHARD_HINT` in the
pipeline, TensorFlow itself rewrites the pipeline.
"""

from __future__ import annotations

from typing import Any

from keras_strategies.errors import InvalidArgumentError
from keras_strategies.input.batches import loaded, rows_of
from keras_strategies.input.worker_shares import resolve_policy, worker_rows
from keras_strategies.types import AutoShardPolicy


def policy_of(dataset: Any) -> AutoShardPolicy:
    """The policy in a dataset's options, by default `AUTO`."""
    found = dataset.options().experimental_distribute.auto_shard_policy
    return AutoShardPolicy(int(getattr(found, "value", found)))


def check_elastic(dataset: Any) -> None:
    """Raises `ValueError` for a policy with batches that depend on the workers."""
    policy = policy_of(dataset)
    if policy not in (AutoShardPolicy.AUTO, AutoShardPolicy.DATA):
        raise InvalidArgumentError(
            f"The dataset's auto_shard_policy is {policy.name}: each worker reads "
            "different rows, and those of a lost worker would be missing. Elastic "
            "workers all read the same global batches. Use AutoShardPolicy.DATA, or "
            "AUTO, which selects DATA with `elastic`."
        )


def separate_input_error() -> InvalidArgumentError:
    """The error for elastic workers with separate input."""
    return InvalidArgumentError(
        "The input is a dataset function, or a dataset with files divided between "
        "workers: each worker reads different rows, and those of a lost worker would "
        "be missing. Elastic workers all read the same global batches. Pass arrays, a "
        "dataset, a PyDataset or a generator of global batches."
    )


def shard(dataset: Any, replicas: tuple[int, ...], worker: int) -> Any:
    """This worker's shard of a dataset.

    Args:
        dataset: a batched `tf.data.Dataset`.
        replicas: the replicas of each worker.
        worker: int, the number of this one.

    Returns:
        A `tf.data.Dataset` of this worker's own rows; None if all workers read the full
        dataset and take their rows of every batch.

    Raises:
        ValueError: for `FILE` without a file for each worker, or global batches with
            fewer rows than workers.
    """
    policy = resolve_policy(policy_of(dataset), len(replicas), count_files(dataset))
    if policy is AutoShardPolicy.DATA:
        return None
    if policy is AutoShardPolicy.OFF:
        return dataset
    from keras_strategies.engines.tensorflow import compat

    tf = loaded("tensorflow")
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = getattr(
        tf.data.experimental.AutoShardPolicy, policy.name
    )
    part = compat.read_by_worker(dataset.with_options(options), len(replicas), worker)
    size = _batch_size(dataset)
    if size is None:
        return part
    own = worker_rows(size, replicas)[worker]
    if own == 0:
        raise InvalidArgumentError(
            f"The dataset's global batches have {size} rows, but {len(replicas)} "
            "workers read separate files. Use batches with at least one row per "
            "worker, or AutoShardPolicy.DATA."
        )
    return part.rebatch(own)


def _batch_size(dataset: Any) -> int | None:
    """The rows of a dataset's batches; None for an empty one."""
    from keras_strategies.engines.tensorflow import compat

    size = compat.static_batch_size(dataset)
    if size > 0:
        return size
    # A `map` after `batch` can hide the size; read the first batch.
    first = next(iter(dataset.take(1)), None)
    return None if first is None else rows_of(first)


def count_files(dataset: Any) -> int | None:
    """The number of files of a pipeline's readers; None if it has no readers.

    Readers inside of `interleave` or `flat_map` are not found.
    """
    from keras_strategies.engines.tensorflow import compat

    tf = loaded("tensorflow")
    counts = [
        int(
            files.cardinality()
            if isinstance(files, tf.data.Dataset)
            else tf.size(files)
        )
        for files in compat.file_readers(dataset)
    ]
    return sum(counts) if counts else None
