"""Losses and metrics on row parts: each replica computes those of its rows.

A loss or metric is split like a layer call: the row proof of its code says how its
result for the global batch follows from those of the replicas' rows. What is not proved
gets the joined tensors.

Some reductions divide by a number of all rows that is not the number of rows: the sum
of sample weights, or of a mask. Replicas add these before they divide.
"""

from __future__ import annotations

import contextlib
import contextvars
import types
from collections.abc import Callable, Iterator
from typing import Any

import keras

from keras_strategies.keras_compat.models.building import has_variables
from keras_strategies.keras_compat.models.row_wise_layers import adds_sums
from keras_strategies.keras_compat.structures import leaves_of
from keras_strategies.rows.row_placements import SAME, SUM, RowProof
from keras_strategies.runtime import context
from keras_strategies.runtime.data_parallel.row_parts import RowParts

# Of metrics that are known to add sums over rows to all of their variables.
_SUMS = RowProof(every_output=SAME, every_loss=SUM, every_update=SUM)
_PLAIN = (type(None), bool, int, float, str)
# Keras does not save attributes with such names.
_LAYER = "__keras_strategies_rows__"


class _FunctionLayer(keras.layers.Layer):  # type: ignore[misc]
    """A loss or metric in the place of a layer, which row proofs and calls are of.

    Args:
        function: the `keras.losses.Loss` or `keras.metrics.Metric`.
    """

    def __init__(self, function: Any):
        # Names of layers have no slashes, those of metrics may.
        super().__init__(name=str(function.name).replace("/", "_"), trainable=False)
        # Not tracked, so that the layer has no variables.
        object.__setattr__(self, "function", function)
        object.__setattr__(self, "configuration", ())

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Copies and pickled objects of the function have none.
        return type(None), ()


def _layer_of(function: Any) -> _FunctionLayer:
    layer: _FunctionLayer | None = getattr(function, _LAYER, None)
    if layer is None or layer.function is not function:
        layer = _FunctionLayer(function)
        object.__setattr__(function, _LAYER, layer)
    configuration = tuple(_configuration(function))
    if configuration != layer.configuration:
        object.__setattr__(layer, "configuration", configuration)
    return layer


def _configuration(function: Any) -> Iterator[Any]:
    """Plain attributes of a loss or metric, its function and arguments of that."""
    for name, value in vars(function).items():
        if isinstance(value, _PLAIN):
            yield name, type(value), value
        elif isinstance(value, types.FunctionType):
            yield name, id(value)
        elif isinstance(value, dict):
            for key, each in value.items():
                if isinstance(each, _PLAIN):
                    yield name, key, type(each), each


def _caller_of(values: Any) -> Any:
    """The data-parallel calls of the first row parts; None without any."""
    if isinstance(values, RowParts):
        return values.caller
    if not isinstance(values, (list, tuple, dict)):
        return None
    for leaf in leaves_of(values):
        if isinstance(leaf, RowParts):
            return leaf.caller
    return None


def loss_of_rows(
    original: Callable[..., Any], loss: Any, y_true: Any, y_pred: Any, weights: Any
) -> Any:
    """`Loss.__call__` on all replicas, or `original` with joined tensors.

    Args:
        original: Keras's `Loss.__call__`.
        loss: the `keras.losses.Loss`.
        y_true: its first argument.
        y_pred: its second argument.
        weights: its third argument.
    """

    def call(y_true: Any, y_pred: Any, weights: Any) -> Any:
        with _counting_all_rows():
            return original(loss, y_true, y_pred, weights)

    caller = _caller_of(y_pred)
    if caller is not None:
        arguments = y_true, y_pred, weights
        is_split, found = caller.on_row_parts(_layer_of(loss), call, arguments, {})
        if is_split:
            return found
    return original(loss, y_true, y_pred, weights)


def update_of_rows(
    original: Callable[..., Any],
    metric: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    is_of_keras: bool,
) -> Any:
    """`update_state` of a metric on all replicas, or `original` with joined tensors.

    The variables of Keras's metrics are sums over batches. Those of replicas begin at
    zero; what replicas add is added to the metric. Of other metrics, the update has to
    call `assign_add`.

    Args:
        original: `update_state`, a callable of the metric and the arguments.
        metric: the `keras.metrics.Metric`.
        args: its arguments.
        kwargs: its keyword arguments.
        is_of_keras: bool, whether the code of the update is Keras's.
    """
    caller = _caller_of([*args, *kwargs.values()])
    # Some create their variables in the first update.
    if caller is not None and has_variables(metric):

        def call(*args: Any, **kwargs: Any) -> None:
            original(metric, *args, **kwargs)

        given = {**dict(zip(("y_true", "y_pred"), args, strict=False)), **kwargs}
        pair: list[Any] = [given.get("y_true"), given.get("y_pred")]
        ranks = [len(x.shape) for x in pair if hasattr(x, "shape")]
        known = _SUMS if adds_sums(metric, ranks) else None
        is_split, _ = caller.on_row_parts(
            _layer_of(metric),
            call,
            args,
            kwargs,
            adds=True,
            only_adds=not is_of_keras,
            known=known,
        )
        if is_split:
            return None
    return original(metric, *args, **kwargs)


_counts_all: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "counts_all_rows", default=False
)


@contextlib.contextmanager
def _counting_all_rows() -> Iterator[None]:
    token = _counts_all.set(True)
    try:
        yield
    finally:
        _counts_all.reset(token)


def mask_weights(
    original: Callable[..., Any], weights: Any, mask: Any, dtype: Any, reduction: Any
) -> Any:
    """`apply_mask` of Keras, with the number of valid entries of all rows."""
    if (
        not _counts_all.get()
        or mask is None
        or reduction not in ("mean", "sum_over_batch_size")
    ):
        return original(weights, mask, dtype, reduction)
    # Without the factor of a mean: weights are zero where the mask is false.
    own = original(weights, mask, dtype, "sum")
    valid = keras.ops.cast(mask, dtype)
    total, valid = _sums_of_all_rows(keras.ops.ones_like(valid), valid)
    return own * keras.ops.divide_no_nan(total, valid)


def reduced_values(
    original: Callable[..., Any], values: Any, weights: Any, reduction: Any
) -> Any:
    """`reduce_values` of Keras, with the sum of the sample weights of all rows."""
    if (
        not _counts_all.get()
        or weights is None
        or reduction != "mean_with_sample_weight"
        or not len(values.shape)
    ):
        return original(values, weights, reduction)
    own = original(values, None, "sum")
    [total] = _sums_of_all_rows(weights)
    return keras.ops.divide_no_nan(own, keras.ops.cast(total, own.dtype))


def _sums_of_all_rows(*tensors: Any) -> list[Any]:
    replica = context.current_replica()
    assert replica is not None
    own = [keras.ops.sum(tensor) for tensor in tensors]
    found: list[Any] = replica.all_reduce("sum", own)
    return found
