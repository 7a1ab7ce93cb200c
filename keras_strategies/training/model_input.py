"""Distributed input of `Model.fit`, `evaluate` and `predict`.

Strategies train on global batches, so Keras gets the global batches that a distributed
dataset was split from.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keras_strategies.communication.communicator import is_fixed
from keras_strategies.errors import InvalidArgumentError
from keras_strategies.input import auto_shard
from keras_strategies.input.array_rows import own_array_rows
from keras_strategies.input.arrays import ArrayDataset
from keras_strategies.input.distributed_dataset import DistributedDataset
from keras_strategies.input.feeds import PerReplicaFeed
from keras_strategies.input.joined_batches import WorkersSource, over_workers
from keras_strategies.input.loader_batches import with_own_rows
from keras_strategies.input.row_dataset import RowDataset, own_rows
from keras_strategies.input.sources import Source, is_tf_data, source_of
from keras_strategies.keras_compat.models.first_batches import is_read_for_shapes
from keras_strategies.runtime.worker_batch import own_rows_of
from keras_strategies.types import InputContext, InputOptions, InputReplicationMode


class DatasetFunction:
    """A dataset function and its input options.

    Args:
        dataset_fn: callable of an `InputContext` that returns a batched dataset.
        input_options: `InputOptions`.
    """

    def __init__(
        self, dataset_fn: Callable[[InputContext], Any], input_options: InputOptions
    ):
        self.dataset_fn = dataset_fn
        self.input_options = input_options

    def source(self, pipelines: InputContext, local_replicas: int) -> Source:
        """Calls the function and returns the global batches of this worker.

        Args:
            pipelines: the input context of this worker.
            local_replicas: int, the replicas of this worker.
        """
        mode = self.input_options.experimental_replication_mode
        if mode is InputReplicationMode.PER_REPLICA:
            made = [
                source_of(self.dataset_fn(pipelines)) for _ in range(local_replicas)
            ]
            return PerReplicaFeed(made, local_replicas).source()
        recording = _RecordingInputContext(
            pipelines.num_input_pipelines,
            pipelines.input_pipeline_id,
            pipelines.num_replicas_in_sync,
        )
        source = source_of(self.dataset_fn(recording))
        if not recording.uses_replicas:
            return source
        return PerReplicaFeed([source], local_replicas).source()


class _RecordingInputContext(InputContext):
    """An `InputContext` that records accesses to the number of replicas."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.__dict__["is_used"] = False

    def __getattribute__(self, name: str) -> Any:
        if name in ("num_replicas_in_sync", "get_per_replica_batch_size"):
            self.__dict__["is_used"] = True
        return super().__getattribute__(name)

    def __repr__(self) -> str:
        # Printing a context does not count as use.
        is_used = self.uses_replicas
        text = super().__repr__()
        self.__dict__["is_used"] = is_used
        return text

    @property
    def uses_replicas(self) -> bool:
        return bool(self.__dict__["is_used"])


def model_arguments(
    strategy: Any, name: str, arguments: dict[str, Any]
) -> dict[str, Any]:
    """Changes of the arguments of `fit`, `evaluate` or `predict`.

    Args:
        strategy: the model's strategy; None for the default one.
        name: str, the method.
        arguments: dict of the given arguments, by name.

    Returns:
        dict of the changed arguments, of `x` and `validation_data`.

    Raises:
        ValueError: for targets or weights with a dataset that contains them.
    """
    if name not in ("fit", "evaluate", "predict"):
        return {}
    changed = {}
    class_weight = arguments.get("class_weight")
    x = arguments.get("x")
    has_others = any(
        arguments.get(other) is not None
        for other in ("y", "sample_weight", "class_weight")
    )

    def is_own(value: Any) -> bool:
        return _row_dataset(value) is not None and own_rows_of(strategy) is not None

    def is_ours(value: Any) -> bool:
        if is_distributed_input(value):
            return True
        return strategy is not None and (
            is_tf_data(value) or is_own(value) or is_read_for_shapes(value)
        )

    if is_distributed_input(x) or is_own(x):
        for other in ("y", "sample_weight"):
            if arguments.get(other) is not None:
                raise InvalidArgumentError(
                    f"`{other}` was given with `x`, a {type(x).__name__}: its "
                    "batches contain it. Omit it."
                )
    servers = None if strategy is None else strategy.drivers.servers
    reads = servers.worker_input if servers and name != "predict" else None
    if reads is not None and isinstance(x, DatasetFunction):
        changed["x"] = reads(x, class_weight)
    elif is_ours(x):
        shuffle = name == "fit" and arguments.get("shuffle", True)
        changed["x"] = _model_input(strategy, x, class_weight, bool(shuffle))
    if not has_others:
        # Keras refuses the others with a loader.
        _read_own_rows(strategy, changed, "x", x)
    validation = arguments.get("validation_data")
    if reads is not None and isinstance(validation, DatasetFunction):
        changed["validation_data"] = reads(validation, None)
    elif is_ours(validation):
        changed["validation_data"] = _model_input(strategy, validation, None)
    _read_own_rows(strategy, changed, "validation_data", validation)
    return changed


def _read_own_rows(
    strategy: Any, changed: dict[str, Any], name: str, given: Any
) -> None:
    """Changes an argument that is a loader of which each worker can read its rows."""
    value = changed.get(name, given)
    own = with_own_rows(value, strategy)
    if own is not value:
        changed[name] = own


def _row_dataset(value: Any) -> RowDataset | None:
    """The `RowDataset` that input is, or was distributed from; None for other input."""
    given = _given(value)
    return given if isinstance(given, RowDataset) else None


def _batched_arrays(value: Any) -> ArrayDataset | None:
    """The batches of array rows that input is, or was distributed from."""
    given = _given(value)
    is_batched = isinstance(given, ArrayDataset) and given.batch_size is not None
    return given if is_batched else None


def _given(value: Any) -> Any:
    """What a dataset of global batches was distributed from; other input as it is."""
    if isinstance(value, DistributedDataset) and value.feed.is_global:
        return value.feed.source().given
    return value


def is_distributed_input(value: Any) -> bool:
    """Whether a value is distributed input of this package."""
    return isinstance(value, (ArrayDataset, DatasetFunction, DistributedDataset))


def _global_input(value: Any, class_weight: dict[int, float] | None) -> Any:
    """Input for workers that come and go: all read the same global batches."""
    if is_tf_data(value):
        auto_shard.check_global(value)
        return value
    is_feed = isinstance(value, DistributedDataset)
    if isinstance(value, DatasetFunction) or (is_feed and not value.feed.is_global):
        raise auto_shard.separate_input_error()
    source = value.feed.source() if is_feed else source_of(value)
    return source.model_input(class_weight)


def _model_input(
    strategy: Any,
    value: Any,
    class_weight: dict[int, float] | None,
    shuffle: bool = False,
) -> Any:
    workers = None if strategy is None else strategy.workers
    by_rows = _row_dataset(value)
    rows = None if by_rows is None else own_rows_of(strategy)
    if by_rows is not None and rows is not None:
        assert workers is not None
        return own_rows(by_rows, workers, rows, shuffle, class_weight)
    if not is_fixed(workers):
        return _global_input(value, class_weight)
    arrays = _batched_arrays(value)
    if arrays is not None and (rows := own_rows_of(strategy)) is not None:
        assert workers is not None
        return own_array_rows(arrays, workers, rows, class_weight)
    if isinstance(value, DistributedDataset):
        source = value.feed.source()
        if workers is not None and not value.feed.is_global:
            source = WorkersSource(source, workers)
    elif isinstance(value, DatasetFunction):
        if strategy is None:
            source = value.source(InputContext(1, 0, 1), 1)
        else:
            local_replicas = len(strategy.placement.replicas)
            source = value.source(strategy.input_context(), local_replicas)
        if workers is not None:
            source = WorkersSource(source, workers)
    elif is_tf_data(value):
        if workers is None:
            return auto_shard.replace_hints(value)
        part = auto_shard.shard(value, workers)
        if part is None:
            return value
        source = over_workers(part, workers)
    else:
        source = source_of(value)
    return source.model_input(class_weight)
