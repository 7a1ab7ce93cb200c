"""Graphs of layer calls and of the functions that their operations call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context as eager_context
from tensorflow.python.eager import execute
from tensorflow.python.framework import func_graph
from tensorflow.python.ops import (
    control_flow_util_v2,
    control_flow_v2_func_graphs,
)

from keras_strategies.keras_compat.private_names import Private

_PYTHON = "tensorflow.python"

PRIVATE_NAMES = (
    Private(
        f"{_PYTHON}.eager.context",
        ("context",),
        "The runtime that computes an operation.",
    ),
    Private(
        f"{_PYTHON}.eager.execute",
        ("execute",),
        "Shapes in the graph of a layer call are computed for several batch sizes.",
    ),
    Private(
        f"{_PYTHON}.framework.func_graph",
        ("FuncGraph",),
        "A layer call is traced in a graph of its own.",
    ),
    Private(
        f"{_PYTHON}.framework.ops.Graph",
        ("_get_function", "_is_function"),
        "Graphs of the functions that operations of a graph call.",
    ),
    Private(
        f"{_PYTHON}.framework.ops.Operation",
        ("_add_control_input", "_update_input"),
        "Gathers of shards wait for operations that are traced after them.",
    ),
    Private(
        f"{_PYTHON}.ops.control_flow_util_v2",
        ("get_func_graph",),
        "Graphs of the branches and bodies of control flow.",
    ),
    Private(
        f"{_PYTHON}.ops.control_flow_v2_func_graphs",
        ("ControlFlowFuncGraph",),
        "Draws and reads in loops and branches of a call are those of the call.",
    ),
)


def new_graph(name: str) -> Any:
    """An empty graph that captures tensors from outside, as a `tf.function` traces."""
    return func_graph.FuncGraph(name)


def is_in_program() -> bool:
    """Whether a program is traced, outside of its inner functions and loops."""
    graph = tf.compat.v1.get_default_graph()
    outer = getattr(graph, "outer_graph", None)
    return outer is not None and not outer.building_function


def graph_around_control_flow() -> Any:
    """The current graph, or the one around its loops and branches."""
    graph = tf.compat.v1.get_default_graph()
    while isinstance(graph, control_flow_v2_func_graphs.ControlFlowFuncGraph):
        graph = graph.outer_graph
    return graph


def is_in_control_flow_of(graph: Any, inner: Any) -> bool:
    """Whether a graph is another one, or that of a loop or branch in it.

    Args:
        graph: the outer graph.
        inner: the graph.
    """
    kind = control_flow_v2_func_graphs.ControlFlowFuncGraph
    while inner is not graph:
        if not isinstance(inner, kind):
            return False
        inner = inner.outer_graph
    return True


def add_control_input(operation: Any, before: Any) -> None:
    """Makes an operation of a graph wait for another one, which it must not precede."""
    operation._add_control_input(before)


def replace_input(operation: Any, number: int, tensor: Any) -> None:
    """Replaces an input of an operation of a graph by an equal tensor."""
    operation._update_input(number, tensor)


def calls_its_type(operation: Any) -> bool:
    """Whether an operation's type is the name of a function of its graph."""
    found: bool = operation.graph._is_function(operation.type)
    return found


def called_graph(operation: Any, attribute: str | None) -> Any:
    """The graph of a function that an operation calls.

    Args:
        operation: the `tf.Operation`.
        attribute: str, its attribute with the function, and its number where that is a
            list, as in "branches 1"; None where the operation's type is its name.
    """
    if attribute is None:
        name = operation.type
    else:
        attribute, _, number = attribute.partition(" ")
        value = operation.get_attr(attribute)
        name = (value[int(number)] if number else value).name
    function = operation.graph._get_function(name)
    found = getattr(function, "graph", None)
    if found is None:
        found = control_flow_util_v2.get_func_graph(operation, None, name)
    return found


def constant_value(operation: Any) -> Any:
    """The array of a `Const`, or of a `Fill` with constants."""
    if operation.type == "Fill":
        sizes, value = (constant_value(tensor.op) for tensor in operation.inputs)
        return np.broadcast_to(value, sizes)
    return tf.make_ndarray(operation.get_attr("value"))


def computed_operation(operation: Any, arrays: Sequence[Any]) -> list[Any]:
    """The results of an operation of a graph for other inputs; in eager mode.

    Args:
        operation: the `tf.Operation`.
        arrays: arrays, one for each of its inputs.

    Raises:
        tf.errors.OpError: if it cannot be computed for them.
    """
    attributes: list[Any] = []
    for name in operation.node_def.attr:
        if not name.startswith("_"):
            value = operation.get_attr(name)
            is_dtype = isinstance(value, tf.DType)
            attributes += [name, value.as_datatype_enum if is_dtype else value]
    inputs = [
        tf.constant(array, tensor.dtype)
        for array, tensor in zip(arrays, operation.inputs, strict=True)
    ]
    results = execute.execute(
        operation.type,
        len(operation.outputs),
        inputs,
        tuple(attributes),
        eager_context.context(),
    )
    return [result.numpy() for result in results]


def inferred_shapes(
    operation: Any, inputs: Sequence[tuple[Any, Sequence[int | None] | None]]
) -> list[list[int | None] | None]:
    """The shapes that an operation's results have for other inputs.

    Args:
        operation: the `tf.Operation`.
        inputs: for each of its inputs its array or None, and its shape.

    Returns:
        list: for each result its shape, None for an unknown rank; empty if TensorFlow
        cannot tell.
    """
    with tf.Graph().as_default() as graph:
        tensors = [
            tf.compat.v1.placeholder(tensor.dtype, shape)
            if array is None
            else tf.constant(array, tensor.dtype)
            for tensor, (array, shape) in zip(operation.inputs, inputs, strict=True)
        ]
        attributes = {
            name: value
            for name, value in operation.node_def.attr.items()
            if not name.startswith("_")
        }
        dtypes = [tensor.dtype for tensor in operation.outputs]
        try:
            made = graph.create_op(operation.type, tensors, dtypes, attrs=attributes)
        except (ValueError, TypeError, RuntimeError):
            # A RuntimeError of an operation that is a function of its graph.
            return []
        return [
            None if tensor.shape.rank is None else tensor.shape.as_list()
            for tensor in made.outputs
        ]
