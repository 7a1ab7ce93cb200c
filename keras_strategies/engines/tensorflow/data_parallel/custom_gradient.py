"""`tf.custom_gradient` whose functions end with their graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import record
from tensorflow.python.framework import ops as graph_ops


def custom_gradient(fn: Callable[..., Any]) -> Callable[..., Any]:
    """As `tf.custom_gradient`, for functions of tensors alone.

    In a graph, TensorFlow 2.21 registers each gradient function by a name of its own
    in a process-wide registry, with the tensors and so the graph and the strategy that
    it refers to. Here the operation refers to the function.

    Args:
        fn: callable of tensors that reads no variables. Returns a tensor or a list of
            tensors, and a function from their gradients to the list of its arguments'
            gradients.
    """
    eager = tf.custom_gradient(fn)

    def decorated(*args: Any) -> Any:
        if tf.executing_eagerly():
            return eager(*args)
        given = [tf.convert_to_tensor(arg) for arg in args]
        result, grad = fn(*given)
        flat = [tf.convert_to_tensor(value) for value in tf.nest.flatten(result)]
        outputs = _with_gradient([*flat, *given], len(flat), grad)
        return tf.nest.pack_sequence_as(result, outputs[: len(flat)])

    return decorated


def _with_gradient(
    tensors: list[Any], count: int, grad: Callable[..., Any]
) -> Sequence[Any]:
    """The tensors, of which the first `count` pass gradients to the others."""

    def on_tape(*gradients: Any) -> list[Any]:
        found = grad(*gradients[:count])
        if not isinstance(found, (list, tuple)):
            found = [found]
        return [*[None] * count, *found]

    def of_operation(operation: Any, *gradients: Any) -> list[Any]:
        return on_tape(*gradients)

    graph = graph_ops.get_default_graph()
    with graph._override_gradient_function({"IdentityN": of_operation}):
        outputs = tf.identity_n(tensors)
    record.record_operation("CustomGradient", outputs, tensors, on_tape)
    return list(outputs)
