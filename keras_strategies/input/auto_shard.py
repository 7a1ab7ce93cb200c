"""Auto-sharding of `tf.data` pipelines between workers.

`tf.data.Options().experimental_distribute.auto_shard_policy` defines how a dataset is
divided. For `FILE` and for `HINT`, with `tf.data.experimental.SHARD_HINT` in the
pipeline, TensorFlow itself rewrites the pipeline.
"""

from __future__ import annotations

import logging
import weakref
from typing import Any

from keras_strategies.communication.communicator import Communicator
from keras_strategies.engines import tf_data_pipelines
from keras_strategies.errors import InvalidArgumentError
from keras_strategies.input.batches import rows_of
from keras_strategies.runtime.row_splits import split_sizes
from keras_strategies.types import AutoShardPolicy

_logger = logging.getLogger("keras_strategies.own_rows")
_named: weakref.WeakSet[Any] = weakref.WeakSet()


def policy_of(dataset: Any) -> AutoShardPolicy:
    """The policy in a dataset's options, by default `AUTO`."""
    found = dataset.options().experimental_distribute.auto_shard_policy
    return AutoShardPolicy(int(getattr(found, "value", found)))


def resolve_policy(
    policy: AutoShardPolicy, num_workers: int, num_files: int | None
) -> AutoShardPolicy:
    """The effective policy.

    Args:
        policy: the requested policy.
        num_workers: int, the number of workers.
        num_files: int, the number of files that the dataset reads; None for no files.

    Returns:
        `OFF` for one worker; for `AUTO`, either `FILE` or `DATA`; else the policy.

    Raises:
        ValueError: for `FILE` without a file for each worker.
    """
    if num_workers == 1:
        return AutoShardPolicy.OFF
    enough = num_files is not None and num_files >= num_workers
    if policy is AutoShardPolicy.AUTO:
        return AutoShardPolicy.FILE if enough else AutoShardPolicy.DATA
    if policy is AutoShardPolicy.FILE and not enough:
        raise InvalidArgumentError(
            f"AutoShardPolicy.FILE needs a file for each of the {num_workers} "
            f"workers, but the dataset reads {num_files or 'no'} files. Split the "
            "data into more files, or use AutoShardPolicy.DATA."
        )
    return policy


def replace_hints(dataset: Any) -> Any:
    """A dataset that one worker reads, without the hints of the policy `HINT`.

    TensorFlow reads `shard(SHARD_HINT, SHARD_HINT)` only where they are replaced.
    """
    if policy_of(dataset) is AutoShardPolicy.HINT:
        return tf_data_pipelines().shard(dataset, "HINT", 1, 0)
    return dataset


def check_global(dataset: Any) -> None:
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


def _warn_of_all_rows(dataset: Any, workers: Communicator) -> None:
    """Says once of a pipeline that each worker calls its functions for all rows."""
    count = workers.group.count
    if count == 1 or policy_of(dataset) is AutoShardPolicy.DATA or dataset in _named:
        return
    if tf_data_pipelines().calls_functions(dataset):
        _named.add(dataset)
        _logger.warning(
            "Each of %d workers reads all rows of a tf.data pipeline with `map` or "
            "another function, %d times the work of one device. To read own rows, put "
            "`shard(tf.data.experimental.SHARD_HINT, "
            "tf.data.experimental.SHARD_HINT)` before the function and set "
            "AutoShardPolicy.HINT; set AutoShardPolicy.DATA to keep it as it is.",
            count,
            count,
        )


def shard(dataset: Any, workers: Communicator) -> Any:
    """This worker's shard of a dataset.

    Args:
        dataset: a batched `tf.data.Dataset`.
        workers: the workers of the strategy.

    Returns:
        A `tf.data.Dataset` of this worker's own rows; None if all workers read the full
        dataset and take their rows of every batch.

    Raises:
        ValueError: for `FILE` without a file for each worker, or global batches with
            fewer rows than workers.
    """
    counts = workers.replica_counts
    count = len(counts.by_worker)
    pipelines = tf_data_pipelines()
    policy = policy_of(dataset)
    if workers.are_device_processes and policy is not AutoShardPolicy.HINT:
        # Batches are those of a script with one process, whatever files are read.
        policy = AutoShardPolicy.DATA
    else:
        policy = resolve_policy(policy, count, pipelines.count_files(dataset))
    if policy is AutoShardPolicy.DATA:
        _warn_of_all_rows(dataset, workers)
        return None
    if policy is AutoShardPolicy.OFF:
        return replace_hints(dataset)
    part = pipelines.shard(dataset, policy.name, count, counts.worker)
    size = pipelines.batch_size(dataset) or _rows_of_first_batch(dataset)
    if size is None:
        return part
    # A worker with a shard of a replica reads rows of its own too.
    sizes = split_sizes(size, sum(counts.by_worker))
    own = sum(counts.split(sizes)[counts.worker])
    if own == 0:
        raise InvalidArgumentError(
            f"The dataset's global batches have {size} rows, but {count} "
            "workers read separate files. Use batches with at least one row per "
            "worker, or AutoShardPolicy.DATA."
        )
    return part.rebatch(own)


def _rows_of_first_batch(dataset: Any) -> int | None:
    """The rows of the first batch; None for an empty dataset.

    A `map` after `batch` can hide the size from the dataset.
    """
    first = next(iter(dataset.take(1)), None)
    return None if first is None else rows_of(first)
