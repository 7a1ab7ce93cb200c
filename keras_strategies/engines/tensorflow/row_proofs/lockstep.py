"""Graphs of one call at several numbers of rows, operation by operation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from keras_strategies.engines.tensorflow.compat.graphs import calls_its_type

#: Attributes that may differ: shapes follow the rows, functions are compared where they
#: are called, and `value`, a constant's, is placed by its own rule.
_SHAPES = {"shape", "shapes", "output_shapes", "element_shape"}


class GraphsDifferError(Exception):
    """The operations of a call depend on its number of rows."""


class Columns:
    """Operations of several graphs that correspond, found from results to arguments.

    Args:
        graphs: graphs of the same Python code at different numbers of rows.
    """

    def __init__(self, graphs: Sequence[Any]):
        self._is_single = len(graphs) == 1
        self._found: dict[Any, tuple[Any, ...]] = {}
        self._inputs_matched: set[Any] = set()
        self._nodes: list[dict[str, Any]] = []
        if not self._is_single:
            definitions = [graph.as_graph_def() for graph in graphs]
            self._nodes = [
                {node.name: node for node in definition.node}
                for definition in definitions
            ]

    def of(self, operation: Any) -> tuple[Any, ...]:
        """The operations that correspond to one of the first graph."""
        return (operation,) if self._is_single else self._found[operation]

    def match(self, tensors: Sequence[Any]) -> None:
        """Notes that tensors, one of each graph, correspond.

        Raises:
            GraphsDifferError: if they are computed by different operations.
        """
        if self._is_single:
            return
        column = tuple(tensor.op for tensor in tensors)
        known = self._found.get(column[0])
        if known is None:
            if not (
                self._are_equal(column)
                or are_constant(column)
                or all(map(calls_its_type, column))
            ):
                raise GraphsDifferError
            self._found[column[0]] = column
        elif any(a is not b for a, b in zip(known, column, strict=True)):
            raise GraphsDifferError
        if len({tensor.value_index for tensor in tensors}) > 1:
            raise GraphsDifferError

    def matched_inputs(self, operation: Any) -> Sequence[Any]:
        """The inputs of an operation; notes that those of all graphs correspond.

        Constants in different forms have none.
        """
        if self._is_single or operation in self._inputs_matched:
            return () if are_constant(self.of(operation)) else operation.inputs
        self._inputs_matched.add(operation)
        column = self._found[operation]
        if are_constant(column):
            return ()
        if len({len(each.inputs) for each in column}) > 1:
            raise GraphsDifferError
        for tensors in zip(*(each.inputs for each in column), strict=True):
            self.match(tensors)
        return operation.inputs  # type: ignore[no-any-return]

    def _are_equal(self, column: Sequence[Any]) -> bool:
        first, *others = (
            nodes[each.name] for nodes, each in zip(self._nodes, column, strict=True)
        )
        return all(_is_equal(first, other) for other in others)


def are_constant(column: Sequence[Any]) -> bool:
    """Whether operations are constants in different forms.

    TensorFlow fills zeros of 1,000 entries or more with a `Fill`.
    """
    types = {each.type for each in column}
    return len(types) > 1 and all(
        each.type == "Const"
        or (each.type == "Fill" and all(t.op.type == "Const" for t in each.inputs))
        for each in column
    )


def _is_equal(first: Any, second: Any) -> bool:
    """Whether the definitions of two operations are equal, but for their inputs."""
    if first.op != second.op:
        return False
    return all(
        name in second.attr
        and (
            _may_differ(first.op, name, value)
            or value.SerializeToString(deterministic=True)
            == second.attr[name].SerializeToString(deterministic=True)
        )
        for name, value in first.attr.items()
    )


def _may_differ(operation: str, name: str, value: Any) -> bool:
    return (
        name.startswith("_")
        or name in _SHAPES
        or value.WhichOneof("value") == "func"
        or bool(value.list.func)
        or (operation == "Const" and name == "value")
    )
