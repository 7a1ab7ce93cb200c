"""Conversion of tensors for TensorFlow's collectives: dtypes, packs, equal rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_strategies.errors import GatherError

_MOVABLE = (tf.float16, tf.float32, tf.float64, tf.int32, tf.int64)
_REDUCIBLE = (*_MOVABLE, tf.bfloat16)
# Dtypes that TensorFlow can neither reduce nor send, and the wider dtype to send.
_CAST = {
    tf.bool: tf.int32,
    tf.int8: tf.int32,
    tf.uint8: tf.int32,
    tf.int16: tf.int32,
    tf.uint16: tf.int32,
}
_SAME_BITS = {
    tf.uint32: tf.int32,
    tf.uint64: tf.int64,
    tf.bfloat16: tf.float16,
    tf.complex64: tf.int64,
}
MOVED_AS = {**_CAST, **_SAME_BITS}
REDUCED_AS = {**_CAST, tf.uint32: tf.int64, tf.uint64: tf.int64}


def to_carrier(tensor: Any, carriers: dict[Any, Any]) -> Any:
    """A tensor in a dtype that TensorFlow's collectives support.

    Args:
        tensor: the tensor.
        carriers: `REDUCED_AS` to reduce it, `MOVED_AS` to send it.

    Raises:
        GatherError: for strings and other tensors that are not numbers.
    """
    kind = carriers.get(tensor.dtype, tensor.dtype)
    can_travel = _REDUCIBLE if carriers is REDUCED_AS else _MOVABLE
    if kind not in can_travel:
        raise GatherError(
            f"A tensor of dtype {tensor.dtype.name} cannot be sent between workers: "
            "TensorFlow's collectives support numbers only. Convert it to a numeric "
            "dtype first."
        )
    if kind == tensor.dtype:
        return tensor
    if carriers is MOVED_AS and tensor.dtype in _SAME_BITS:
        return tf.bitcast(tensor, kind)
    return tf.cast(tensor, kind)


def from_carrier(tensor: Any, kind: Any, carriers: dict[Any, Any]) -> Any:
    """Converts a received tensor back to its own dtype."""
    if tensor.dtype == kind:
        return tensor
    if carriers is MOVED_AS and kind in _SAME_BITS:
        return tf.bitcast(tensor, kind)
    return tf.cast(tensor, kind)


def flat(tensors: Sequence[Any]) -> Any:
    """Tensors of one dtype as one pack."""
    if len(tensors) == 1:
        return tensors[0]
    return tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], 0)


def like(flat: Any, tensors: Sequence[Any]) -> list[Any]:
    """The tensors of a pack, with the shapes of the given tensors."""
    if len(tensors) == 1:
        flat.set_shape(tensors[0].shape)
        return [flat]
    parts = tf.split(flat, [math.prod(tensor.shape) for tensor in tensors])
    return [
        tf.reshape(part, tensor.shape)
        for part, tensor in zip(parts, tensors, strict=True)
    ]


def padded(tensor: Any, missing: Any) -> Any:
    """A tensor with rows of zeros appended."""
    if isinstance(missing, int) and missing == 0:
        return tf.identity(tensor)
    widths = [[0, missing], *([[0, 0]] * (len(tensor.shape) - 1))]
    return tf.pad(tensor, widths)
