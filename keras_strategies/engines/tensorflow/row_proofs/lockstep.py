"""Graphs of one call at several numbers of rows, operation by operation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

#: Attributes that may differ: shapes follow the rows, functions are compared where they
#: are called, and `value`, a constant's, is placed by its own rule.
_SHAPES = {"shape", "shapes", "output_shapes", "element_shape"}


class GraphsDifferError(Exception):
    """The operations of a call depend on its number of rows."""


def aligned(graphs: Sequence[Any]) -> list[tuple[Any, ...]]:
    """The operations of graphs that correspond, in the order of the first graph.

    Args:
        graphs: graphs of the same Python code at different numbers of rows.

    Raises:
        GraphsDifferError: if they do not have the same operations.
    """
    columns = [graph.get_operations() for graph in graphs]
    if len(columns) == 1:
        return [(operation,) for operation in columns[0]]
    if len({len(column) for column in columns}) > 1:
        raise GraphsDifferError
    nodes = [_nodes(graph) for graph in graphs]
    for first, *others in zip(*nodes, strict=True):
        if any(not _is_equal(first, other) for other in others):
            raise GraphsDifferError
    return list(zip(*columns, strict=True))


def _nodes(graph: Any) -> list[tuple[Any, list[tuple[int, str]]]]:
    """The definition of each operation, and its inputs by position."""
    definition = graph.as_graph_def()
    position = {node.name: i for i, node in enumerate(definition.node)}
    found = []
    for node in definition.node:
        inputs = []
        for name in node.input:
            producer, _, output = name.removeprefix("^").partition(":")
            inputs.append((position[producer], output))
        found.append((node, inputs))
    return found


def _is_equal(
    first: tuple[Any, list[tuple[int, str]]], second: tuple[Any, list[tuple[int, str]]]
) -> bool:
    (one, inputs), (other, other_inputs) = first, second
    if one.op != other.op or inputs != other_inputs:
        return False
    return all(
        name in other.attr
        and (
            _may_differ(one.op, name, value)
            or value.SerializeToString(deterministic=True)
            == other.attr[name].SerializeToString(deterministic=True)
        )
        for name, value in one.attr.items()
    )


def _may_differ(operation: str, name: str, value: Any) -> bool:
    return (
        name.startswith("_")
        or name in _SHAPES
        or value.WhichOneof("value") == "func"
        or (operation == "Const" and name == "value")
    )
