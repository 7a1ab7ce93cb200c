"""Distributed input of `Model.fit`, `evaluate` and `predict`.

Strategies train on global batches, so a dataset that was distributed is given to
Keras as the global batches that it came from.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keras_strategies.errors import InvalidArgumentError, InvalidTypeError
from keras_strategies.input import auto_shard
from keras_strategies.input.arrays import ArrayDataset
from keras_strategies.input.distributed_dataset import DistributedDataset
from keras_strategies.input.feeds import PerReplicaFeed
from keras_strategies.input.joined_batches import WorkersSource, over_workers
from keras_strategies.input.sources import Source, is_tf_data, source_of
from keras_strategies.types import InputContext, InputOptions, InputReplicationMode


class DatasetCreator:
    """Dataset function for `fit`, `evaluate` or `predict`.

    The function is called once for each worker when the method begins. If it reads the
    number of replicas from its context, by `get_per_replica_batch_size` or
    `num_replicas_in_sync`, each of its batches is for one replica. Otherwise its
    batches are this worker's part of the global batch. Either way `fit` computes what
    one device computes on these global batches.

    Args:
        dataset_fn: callable of an `InputContext` that returns a batched dataset of
            any kind.
        input_options: `InputOptions`, or None for the defaults. Only
            `experimental_replication_mode` may be set: `fit` moves batches to the
            devices by itself.

    Raises:
        TypeError: if `dataset_fn` is not callable, or `input_options` is something
            else.
        ValueError: for input options that `fit` has no use for.

    Example:

    >>> def dataset_fn(context):
    ...     batch_size = context.get_per_replica_batch_size(64)
    ...     dataset = tf.data.Dataset.from_tensor_slices((x, y))
    ...     dataset = dataset.shard(
    ...         context.num_input_pipelines, context.input_pipeline_id)
    ...     return dataset.batch(batch_size)
    >>> model.fit(ks.DatasetCreator(dataset_fn), epochs=5)
    """

    def __init__(
        self,
        dataset_fn: Callable[[InputContext], Any],
        input_options: InputOptions | None = None,
    ):
        if not callable(dataset_fn):
            raise TypeError(
                "`dataset_fn` must be a function of an InputContext that returns a "
                f"dataset. Received: {dataset_fn!r} of type "
                f"{type(dataset_fn).__name__}. Write `DatasetCreator(lambda context: "
                "dataset)` for a dataset."
            )
        options = InputOptions.parse(input_options, "input_options", InvalidTypeError)
        _check_used_in_fit(options)
        # `hooks` imports this module.
        from keras_strategies.training.model_hooks import install_hooks

        install_hooks()
        self.dataset_fn = dataset_fn
        self.input_options = options

    def __repr__(self) -> str:
        name = getattr(self.dataset_fn, "__qualname__", repr(self.dataset_fn))
        return f"<DatasetCreator of {name}, input_options={self.input_options!r}>"

    def source(self, pipelines: InputContext, local_replicas: int) -> Source:
        """Calls the function and returns the global batches of this worker.

        Args:
            pipelines: which of the workers this is.
            local_replicas: int, the replicas of this worker.
        """
        mode = self.input_options.experimental_replication_mode
        if mode is InputReplicationMode.PER_REPLICA:
            made = [
                source_of(self.dataset_fn(pipelines)) for _ in range(local_replicas)
            ]
            return PerReplicaFeed(made, local_replicas).source()
        asked = _RecordingInputContext(
            pipelines.num_input_pipelines,
            pipelines.input_pipeline_id,
            pipelines.num_replicas_in_sync,
        )
        source = source_of(self.dataset_fn(asked))
        if not asked.uses_replicas:
            return source
        return PerReplicaFeed([source], local_replicas).source()


def _check_used_in_fit(options: InputOptions) -> None:
    """Raises `InvalidArgumentError` for options that `fit` has no use for."""
    default = InputOptions()
    for name in (
        "experimental_fetch_to_device",
        "experimental_place_dataset_on_device",
        "experimental_per_replica_buffer_size",
    ):
        value = getattr(options, name)
        if value != getattr(default, name):
            raise InvalidArgumentError(
                f"`input_options` of a DatasetCreator has {name}={value!r}, but "
                "`fit` prefetches batches to the devices itself. Omit it; "
                "`strategy.distribute_datasets_from_function` accepts it, for "
                "custom loops."
            )


class _RecordingInputContext(InputContext):
    """An `InputContext` that records accesses to the number of replicas."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.__dict__["asked"] = False

    def __getattribute__(self, name: str) -> Any:
        if name in ("num_replicas_in_sync", "get_per_replica_batch_size"):
            self.__dict__["asked"] = True
        return super().__getattribute__(name)

    def __repr__(self) -> str:
        # To print a context is not to ask it.
        asked = self.uses_replicas
        text = super().__repr__()
        self.__dict__["asked"] = asked
        return text

    @property
    def uses_replicas(self) -> bool:
        return bool(self.__dict__["asked"])


def model_arguments(
    strategy: Any, name: str, arguments: dict[str, Any]
) -> dict[str, Any]:
    """Changes of the arguments of `fit`, `evaluate` or `predict`.

    Args:
        strategy: the model's strategy; None for the default one.
        name: str, the method.
        arguments: dict, what was given, by name.

    Returns:
        dict of the arguments that are others: `x` and `validation_data`.

    Raises:
        ValueError: for targets or weights beside a dataset that contains them.
    """
    if name not in ("fit", "evaluate", "predict"):
        return {}
    changed = {}
    class_weight = arguments.get("class_weight")
    x = arguments.get("x")
    sharded = strategy is not None and strategy.workers is not None

    def is_ours(value: Any) -> bool:
        return is_distributed_input(value) or (sharded and is_tf_data(value))

    if is_distributed_input(x):
        for other in ("y", "sample_weight"):
            if arguments.get(other) is not None:
                raise InvalidArgumentError(
                    f"`{other}` was given with `x`, a {type(x).__name__}, whose "
                    "batches contain it. Omit it."
                )
    if is_ours(x):
        changed["x"] = _model_input(strategy, x, class_weight)
    validation = arguments.get("validation_data")
    if is_ours(validation):
        changed["validation_data"] = _model_input(strategy, validation, None)
    return changed


def is_distributed_input(value: Any) -> bool:
    """Whether a value is distributed input of this package."""
    return isinstance(value, (ArrayDataset, DatasetCreator, DistributedDataset))


def _model_input(
    strategy: Any, value: Any, class_weight: dict[int, float] | None
) -> Any:
    group = None
    if strategy is not None and strategy.workers is not None:
        group = strategy.workers.group
    if isinstance(value, DistributedDataset):
        source = value.feed.source()
        if group is not None and not value.feed.is_global:
            source = WorkersSource(source, group)
    elif isinstance(value, DatasetCreator):
        if strategy is None:
            source = value.source(InputContext(1, 0, 1), 1)
        else:
            local_replicas = len(strategy.placement.replicas)
            source = value.source(strategy.input_context(), local_replicas)
        if group is not None:
            source = WorkersSource(source, group)
    elif is_tf_data(value):
        assert strategy is not None and strategy.workers is not None and group
        part = auto_shard.shard(value, strategy.workers.replicas, group.index)
        if part is None:
            return value
        source = over_workers(part, group)
    else:
        source = source_of(value)
    return source.model_input(class_weight)
