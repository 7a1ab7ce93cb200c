"""`tf.custom_gradient` with gradient functions that are freed with their graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_strategies.engines.tensorflow.compat.gradients import with_gradient


def custom_gradient(fn: Callable[..., Any]) -> Callable[..., Any]:
    """As `tf.custom_gradient`, for functions of tensors that read no variables.

    In a graph, TensorFlow 2.21 adds each gradient function to a process-wide registry,
    which keeps alive the tensors, graph and strategy that it refers to. Here only the
    operation refers to the function.

    Args:
        fn: callable of tensors. Returns a tensor or a list of tensors, and a function
            from their gradients to the list of its arguments' gradients.
    """
    eager = tf.custom_gradient(fn)

    def decorated(*args: Any) -> Any:
        if tf.executing_eagerly():
            return eager(*args)
        given = [tf.convert_to_tensor(arg) for arg in args]
        result, grad = fn(*given)
        flat = [tf.convert_to_tensor(value) for value in tf.nest.flatten(result)]
        count = len(flat)

        def gradient(*gradients: Any) -> list[Any]:
            found = grad(*gradients[:count])
            if not isinstance(found, (list, tuple)):
                found = [found]
            return [*[None] * count, *found]

        outputs = with_gradient([*flat, *given], gradient)
        return tf.nest.pack_sequence_as(result, outputs[:count])

    return decorated
