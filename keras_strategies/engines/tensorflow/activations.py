"""The largest activation of a model, from its graph."""

from __future__ import annotations

import math
from typing import Any

import keras
import tensorflow as tf

_NOT_COMPUTED = ("Placeholder", "ReadVariableOp")


def largest_activation(model: Any, x: Any, share: int) -> int:
    """Bytes of the largest tensor that a call of a model computes.

    Args:
        model: a built model with variables without values.
        x: structure of `keras.KerasTensor`, its inputs.
        share: int, the parts that the rows are divided into; the largest one is taken.
    """

    def spec(leaf: Any) -> tf.TensorSpec:
        [*shape] = leaf.shape
        if shape:
            shape[0] = math.ceil(shape[0] / share)
        return tf.TensorSpec(shape, leaf.dtype)

    def call(x: Any) -> Any:
        return model(x, training=True)

    program = tf.function(tf.autograph.experimental.do_not_convert(call))
    specs = keras.tree.map_structure(spec, x)
    graph = program.get_concrete_function(specs).graph
    made = (op for op in graph.get_operations() if op.type not in _NOT_COMPUTED)
    return max((_size(each) for op in made for each in op.outputs), default=0)


def _size(tensor: Any) -> int:
    if tensor.dtype in (tf.resource, tf.variant, tf.string):
        return 0
    return (tensor.shape.num_elements() or 0) * int(tensor.dtype.size)
