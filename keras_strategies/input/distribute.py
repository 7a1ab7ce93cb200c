"""Implementation of the strategies' dataset methods."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import keras

from keras_strategies.communication.communicator import Communicator, is_fixed
from keras_strategies.communication.replica_counts import ReplicaCounts
from keras_strategies.errors import InvalidArgumentError, InvalidTypeError
from keras_strategies.input import auto_shard
from keras_strategies.input.arrays import ArrayDataset, are_arrays
from keras_strategies.input.distributed_dataset import DistributedDataset
from keras_strategies.input.feeds import EqualStepsFeed, Feed, PerReplicaFeed, SplitFeed
from keras_strategies.input.sources import (
    LoaderSource,
    Source,
    is_tf_data,
    source_of,
    source_of_elements,
)
from keras_strategies.input.workers_loader import WorkersLoaderSource
from keras_strategies.types import InputContext, InputOptions, InputReplicationMode

if TYPE_CHECKING:
    from keras_strategies.runtime.engine import StrategyCore


def dataset(
    strategy: StrategyCore,
    given: Any,
    options: InputOptions | None,
    batch_size: int | None,
) -> DistributedDataset:
    """See `Strategy.experimental_distribute_dataset`."""
    options = InputOptions.parse(options)
    if options.experimental_replication_mode is InputReplicationMode.PER_REPLICA:
        raise InvalidArgumentError(
            "`experimental_distribute_dataset` splits one dataset over all "
            "replicas. InputReplicationMode.PER_REPLICA, one dataset per replica, "
            "needs `distribute_datasets_from_function`."
        )
    if isinstance(given, DistributedDataset):
        given = given.feed.source()
        if isinstance(given, WorkersLoaderSource):
            # Its workers are those of another strategy.
            given = given.given
    workers = strategy.workers
    if not is_fixed(workers) and is_tf_data(given):
        auto_shard.check_global(given)
    elif workers is not None and is_tf_data(given):
        part = auto_shard.shard(given, workers)
        if part is not None:
            # Rows of this worker.
            counts = ReplicaCounts((workers.replica_counts.count,))
            feed = SplitFeed(source_of(part), lambda: counts, is_global=False)
            return _distributed(strategy, feed, options)
    elif is_tf_data(given):
        given = auto_shard.replace_hints(given)
    source = source_of(given, batch_size)
    if workers is not None and workers.group.count > 1 and is_fixed(workers):
        source = _compared(source, workers)
    feed = SplitFeed(source, lambda: strategy.placement.replica_counts)
    return _distributed(strategy, feed, options)


def _compared(source: Source, workers: Communicator) -> Source:
    """A source that compares the orders of workers, which read their own rows."""
    if not isinstance(source, LoaderSource) or not source.is_read_in_turn:
        return source
    if source.own_batches is None:
        source.warn_of_all_rows(workers)
        return source
    return WorkersLoaderSource(source.given, workers)


def from_function(
    strategy: StrategyCore,
    dataset_fn: Callable[[InputContext], Any],
    options: InputOptions | None,
) -> DistributedDataset:
    """See `Strategy.distribute_datasets_from_function`."""
    options = InputOptions.parse(options)
    check_dataset_fn(dataset_fn)
    if not is_fixed(strategy.workers):
        raise auto_shard.separate_input_error()
    pipelines = strategy.input_context()
    count = strategy.placement.replica_counts.count
    if options.experimental_replication_mode is not InputReplicationMode.PER_REPLICA:
        sources: list[Source] = [source_of_elements(dataset_fn(pipelines))]
    else:
        sources = [source_of_elements(dataset_fn(pipelines)) for _ in range(count)]
    return _distributed(strategy, PerReplicaFeed(sources, count), options)


def check_dataset_fn(dataset_fn: Any) -> None:
    if not callable(dataset_fn):
        raise InvalidTypeError(
            "`dataset_fn` must be a function of an InputContext that returns a "
            f"dataset. Received: {dataset_fn!r} of type {type(dataset_fn).__name__}. "
            "Use `experimental_distribute_dataset` for a dataset."
        )


def iterates_batches(given: Any) -> bool:
    """Whether a `for` loop over a dataset yields its batches."""
    if isinstance(given, (keras.utils.PyDataset, str, bytes, dict)):
        return False
    return isinstance(given, (Iterable, ArrayDataset)) and not are_arrays(given)


def _distributed(
    strategy: StrategyCore, feed: Feed, options: InputOptions
) -> DistributedDataset:
    if strategy.workers is not None and not feed.is_global:
        feed = EqualStepsFeed(feed, strategy.workers.group)
    return DistributedDataset(
        strategy.engine, strategy.placement.replicas, feed, options, strategy.workers
    )
