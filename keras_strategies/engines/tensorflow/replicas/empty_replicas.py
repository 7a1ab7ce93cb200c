"""Padding with one row for layers with kernels that fail on zero rows.

A replica without data still runs, on zero rows, which fails in some CPU kernels of
TensorFlow 2.21: convolutions return the channels of their input, recurrent cells and
global maxima raise errors, and the gradient of max pooling ends the process. These
layers compute each row separately and have no state, so a row of zeros that is removed
from the result changes no value and adds zeros to gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras import layers

from keras_strategies.keras_compat.models.layers import get_mask, set_mask

_PADDED_LAYERS = (
    layers.Conv1D,
    layers.Conv2D,
    layers.Conv3D,
    layers.Conv1DTranspose,
    layers.Conv2DTranspose,
    layers.Conv3DTranspose,
    layers.DepthwiseConv1D,
    layers.DepthwiseConv2D,
    layers.SeparableConv1D,
    layers.SeparableConv2D,
    layers.MaxPooling1D,
    layers.MaxPooling2D,
    layers.MaxPooling3D,
    layers.GlobalMaxPooling1D,
    layers.GlobalMaxPooling2D,
    layers.GlobalMaxPooling3D,
    layers.RNN,
)


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
    return isinstance(layer, _PADDED_LAYERS)


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
