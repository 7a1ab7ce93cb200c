"""Padding with one row where a replica of `run` has no rows.

A replica without data still runs, on zero rows. Some kernels of TensorFlow fail on
these (`FAILING_KERNELS`), and so does code of Keras: LSTM cells and maxima raise
errors. Both compute each row separately and have no state, so a row of zeros that
is removed from the result changes no value and adds zeros to gradients. Kernels are
padded wherever a replica's function calls them; the layers whose code raises are padded
as a whole.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras import layers

from keras_strategies.engines.tensorflow.compat.operations import (
    replace_failing_kernels,
)
from keras_strategies.keras_compat.models.layer_calls import layer_calls_through
from keras_strategies.keras_compat.models.layers import get_mask, set_mask
from keras_strategies.runtime.once import once

# Keras 3.15: `ops.add` takes zero rows for a missing axis, `ops.max` refuses them.
_RAISING_LAYERS = (
    layers.GlobalMaxPooling1D,
    layers.GlobalMaxPooling2D,
    layers.GlobalMaxPooling3D,
    layers.RNN,
)

_is_padding: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "pads_kernels", default=False
)


@contextlib.contextmanager
def padding_empty_replicas(is_on_cpu: bool) -> Iterator[None]:
    """Context of a replica's call, in which no kernel has zero rows.

    Args:
        is_on_cpu: bool, whether the replica is on a CPU, the kernels of which fail.
    """
    token = _is_padding.set(is_on_cpu)
    try:
        with layer_calls_through(call_with_a_row if is_on_cpu else None):
            yield
    finally:
        _is_padding.reset(token)


@once
def pad_kernels() -> None:
    """Replaces the kernels that fail on zero rows, once for the process."""
    replace_failing_kernels(_padded)


def _padded(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)
    names = [*signature.parameters]
    # The input of a transposed convolution is the gradient of another one's output.
    rows_of = "out_backprop" if "out_backprop" in names else names[0]

    @functools.wraps(original)
    def kernel(*args: Any, **kwargs: Any) -> Any:
        if not _is_padding.get():
            return original(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments
        tensor = tf.convert_to_tensor(given[rows_of])
        if not tensor.shape.rank or tensor.shape[0]:
            return original(*args, **kwargs)
        rows = tensor.shape[0]
        count = 0 if rows == 0 else tf.shape(tensor)[0]
        [given[rows_of]] = _with_a_row([tensor], rows)
        if "input_sizes" in given:
            sizes = tf.convert_to_tensor(given["input_sizes"])
            given["input_sizes"] = tf.concat([tf.maximum(sizes[:1], 1), sizes[1:]], 0)
        outputs = original(**given)
        return tf.nest.map_structure(
            lambda each: each[:count] if each.shape.rank == tensor.shape.rank else each,
            outputs,
        )

    return kernel


def call_with_a_row(
    layer: Any, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Calls `layer(*args, **kwargs)` with one row of zeros if it has no rows.

    Routed to by `layer_calls_through`.

    Args:
        layer: the layer.
        call: its original `__call__`.
        args: its arguments.
        kwargs: its keyword arguments.
    """
    if not _needs_a_row(layer):
        return call(*args, **kwargs)
    leaves = keras.tree.flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, tf.Tensor)]
    # The first tensor is the layer's input.
    rows = tensors[0].shape[0] if tensors and tensors[0].shape.rank else 1
    if rows:
        return call(*args, **kwargs)
    batched = [t for t in tensors if t.shape.rank and t.shape[0] == rows]
    masks = [get_mask(tensor) for tensor in batched]
    filled = iter(_with_a_row([*batched, *(m for m in masks if m is not None)], rows))
    instead = {id(tensor): next(filled) for tensor in batched}
    for tensor, mask in zip(batched, masks, strict=True):
        if mask is not None:
            set_mask(instead[id(tensor)], next(filled))
    packed = keras.tree.pack_sequence_as(
        (args, kwargs), [instead.get(id(leaf), leaf) for leaf in leaves]
    )
    count = 0 if rows == 0 else tf.shape(batched[0])[0]
    outputs = call(*packed[0], **packed[1])
    return keras.tree.map_structure(lambda output: _first_rows(output, count), outputs)


def _needs_a_row(layer: Any) -> bool:
    if isinstance(layer, layers.TimeDistributed):
        layer = layer.layer  # It is called without `__call__`.
    return isinstance(layer, _RAISING_LAYERS)


def _with_a_row(tensors: list[Any], rows: int | None) -> list[Any]:
    """The tensors with a row of zeros each if they have none."""

    def fill() -> list[Any]:
        return [
            tf.pad(tensor, [[0, 1]] + [[0, 0]] * (tensor.shape.rank - 1))
            for tensor in tensors
        ]

    if rows == 0:
        return fill()
    has_rows = tf.shape(tensors[0])[0] > 0
    found = tf.cond(has_rows, lambda: [tf.identity(t) for t in tensors], fill)
    return list(found)


def _first_rows(output: Any, count: Any) -> Any:
    if not isinstance(output, tf.Tensor) or not output.shape.rank:
        return output
    rows = output[:count]
    mask = get_mask(output)
    if mask is not None:
        set_mask(rows, mask[:count])
    return rows
