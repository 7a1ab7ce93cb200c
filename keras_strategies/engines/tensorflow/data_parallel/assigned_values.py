"""Gradients of variables that a layer assigns in its call."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from keras_strategies.engines.tensorflow.data_parallel.custom_gradient import (
    custom_gradient,
)


def assigned_value(current: Any, value: Any) -> Any:
    """The value read after an assignment; its gradient is that of the variable.

    On one device `tf.Variable.assign` is not differentiable, and a tape sums the
    gradients of all reads of a variable. On a replica, where assigned values are
    tensors, this function has the same effect.

    Args:
        current: tensor, the variable's value before the assignment.
        value: tensor of the same shape and dtype.
    """

    @custom_gradient
    def assign(current: Any) -> Any:
        return tf.identity(tf.stop_gradient(value)), lambda gradient: gradient

    return assign(current)
