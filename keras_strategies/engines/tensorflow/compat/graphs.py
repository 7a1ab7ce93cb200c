"""Graphs of layer calls and of the functions that their operations call."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tensorflow.python.framework import func_graph
from tensorflow.python.ops import (
    control_flow_v2_func_graphs,
)

from keras_strategies.keras_compat.private_names import Private

_PYTHON = "tensorflow.python"

PRIVATE_NAMES = (
    Private(
        f"{_PYTHON}.framework.func_graph",
        ("FuncGraph",),
        "A layer call is traced in a graph of its own.",
    ),
    Private(
        f"{_PYTHON}.framework.ops.Operation",
        ("_add_control_input", "_update_input"),
        "Gathers of shards wait for operations that are traced after them.",
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
