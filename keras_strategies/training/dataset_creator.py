"""`DatasetCreator`: a dataset function for `Model.fit`, `evaluate` and `predict`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keras_strategies.errors import InvalidArgumentError, InvalidTypeError
from keras_strategies.training.model_hooks import install_hooks
from keras_strategies.training.model_input import DatasetFunction
from keras_strategies.types import InputContext, InputOptions


class DatasetCreator(DatasetFunction):
    """Dataset function for `fit`, `evaluate` or `predict`.

    The function is called once for each worker when the method begins. If it reads the
    number of replicas from its context, by `get_per_replica_batch_size` or
    `num_replicas_in_sync`, each of its batches is for one replica. Otherwise its
    batches are this worker's part of the global batch. Either way `fit` computes what
    one device computes on these global batches.

    On parameter servers each batch is that of a step: workers call the function and
    read its batches, and steps are divided over them.

    Args:
        dataset_fn: callable of an `InputContext` that returns a batched dataset of
            any kind.
        input_options: `InputOptions`, or None for the defaults. Only
            `experimental_replication_mode` may be set: `fit` moves batches to the
            devices by itself.

    Raises:
        TypeError: if `dataset_fn` is not callable, or `input_options` is something
            else.
        ValueError: for input options that `fit` does not support.

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
            raise InvalidTypeError(
                "`dataset_fn` must be a function of an InputContext that returns a "
                f"dataset. Received: {dataset_fn!r} of type "
                f"{type(dataset_fn).__name__}. Write `DatasetCreator(lambda context: "
                "dataset)` for a dataset."
            )
        options = InputOptions.parse(input_options, "input_options", InvalidTypeError)
        _check_used_in_fit(options)
        install_hooks()
        super().__init__(dataset_fn, options)

    def __repr__(self) -> str:
        name = getattr(self.dataset_fn, "__qualname__", repr(self.dataset_fn))
        return f"<DatasetCreator of {name}, input_options={self.input_options!r}>"


def _check_used_in_fit(options: InputOptions) -> None:
    """Raises `InvalidArgumentError` for options that `fit` does not support."""
    default = InputOptions()
    for name in (
        "experimental_fetch_to_device",
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
