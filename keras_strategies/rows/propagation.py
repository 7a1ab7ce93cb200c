"""Placements of all tensors in the traces of a call, from its arguments on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

import keras_strategies.rows.rules  # noqa: F401  Registers the rules.
from keras_strategies.keras_compat.structures import leaves_of
from keras_strategies.rows.exchanges import Exchanges
from keras_strategies.rows.placed import (
    Counts,
    MixesRows,
    Placed,
    are_equal,
    as_array,
    fits,
    mixed,
    place_constant,
)
from keras_strategies.rows.row_tensors import RowTensor, is_array, shape_of, tensors_in
from keras_strategies.rows.rules.step import RULES, TENSORS_AS_ATTRIBUTES, Step
from keras_strategies.rows.trace import Node

#: Operations whose result does not depend on the values.
_OF_SHAPES = frozenset(["EmptyLike", "OnesLike", "Size", "ZerosLike"])
#: Arguments that must not mix rows, where others are shapes or numbers of rows.
_OPERANDS = {
    "GetItem": ("x",),
    "ScaleAndTranslate": ("images", "scale", "translation"),
}
#: Attributes of operations that may depend on the number of rows: shapes of results.
_VARYING = {
    "BroadcastTo": "shape",
    "Repeat": "repeats",
    "Tile": "repeats",
    "Reshape": "newshape",
    "Scatter": "shape",
    "Slice": "shape",
}


class Propagation:
    """Placements of all tensors of the traces of a call.

    Args:
        counts: the numbers of rows of the traces.
        is_any: bool, whether they stand for any number.
        exchanges: the sums over rows that replicas exchange.
    """

    def __init__(self, counts: Counts, is_any: bool, exchanges: Exchanges):
        self.exchanges = exchanges
        self.counts = counts
        self.is_any = is_any
        #: By the index of a tensor, which is the same in all traces.
        self.known: dict[int, Placed] = {}
        self._row_numbers: set[int] = set()
        #: Why the call is not split, whatever its results are.
        self.problem: str | None = None

    def placed(self, values: Sequence[Any]) -> list[Placed]:
        """The placements of the leaves of a structure, given as it is in each trace."""
        columns = self.columns(values)
        return [self.of_leaf(leaves) for leaves in columns if leaves[0] is not None]

    def columns(
        self, values: Sequence[Any], what: str = "has other arguments"
    ) -> list[tuple[Any, ...]]:
        """The leaves of a structure, each as it is in all traces."""
        every = [leaves_of(value) for value in values]
        if len(set(map(len, every))) != 1:
            raise MixesRows(f"{what} for other numbers of rows")
        return list(zip(*every, strict=True))

    def of_leaf(self, leaves: Sequence[Any]) -> Placed:
        """The placement of a tensor or constant, given as it is in each trace."""
        first = leaves[0]
        if isinstance(first, RowTensor):
            if not all(are_equal(first, leaf) for leaf in leaves[1:]):
                raise MixesRows("gets other tensors for other numbers of rows")
            return self.known[first.index]
        try:
            return place_constant(leaves, self.counts)
        except MixesRows as error:
            return mixed(str(error))

    def are_row_numbers(self, values: Sequence[Any]) -> bool:
        """Whether an index is 0, 1, ..., n - 1 along one axis."""
        if isinstance(values[0], RowTensor):
            return values[0].index in self._row_numbers
        return all(map(is_array, values)) and all(
            np.array_equal(as_array(value).reshape(-1), np.arange(n))
            for value, n in zip(values, self.counts, strict=True)
        )

    def body(self, step: Step, number: int, placed: list[Placed]) -> list[Placed]:
        """The placements of the outputs of a function in an operation."""
        bodies = [node.bodies[number] for node in step.nodes]
        inputs = [x for x in leaves_of(bodies[0].inputs) if x is not None]
        for tensor, each in zip(inputs, placed, strict=True):
            self.known[tensor.index] = each
        self.run([body.nodes for body in bodies])
        return self.placed([body.outputs for body in bodies])

    def run(self, every: Sequence[list[Node]]) -> None:
        """Places the results of operations, given as they are in each trace."""
        kinds = {tuple((node.name, node.number) for node in nodes) for nodes in every}
        if len(kinds) != 1:
            raise MixesRows("has other operations for other numbers of rows")
        for nodes in zip(*every, strict=True):
            self._place(nodes)

    def _place(self, nodes: tuple[Node, ...]) -> None:
        first = nodes[0]
        outputs = [leaves_of(node.outputs) for node in nodes]
        tensors = [x for x in outputs[0] if isinstance(x, RowTensor)]
        if first.name == "row_numbers":
            self._row_numbers.add(tensors[0].index)
        try:
            found = self._by_rule(nodes)
        except MixesRows as error:
            found = mixed(str(error))
        if first.name == "in_place" and found.is_mixed:
            self.problem = found.reason
        every = found if isinstance(found, list) else [found] * len(tensors)
        if len(every) != len(tensors):
            every = [mixed("has another number of results")] * len(tensors)
        for i, (tensor, placed) in enumerate(zip(tensors, every, strict=True)):
            shapes = [shape_of(leaves[i]) for leaves in outputs]
            if not placed.is_mixed and not fits(placed, shapes, self.counts):
                placed = mixed("has a result with another number of rows")
            if self._rounds(first, tensor, placed):
                placed = mixed("rounds a sum over rows, or a number of rows")
            if placed.is_mixed and not placed.reason.startswith("'"):
                at = f" ({first.place})" if first.place else ""
                placed = mixed(f"{first.name!r}{at} {placed.reason}")
            self.known[tensor.index] = placed
        self.exchanges.follow(first, tensors, self.known)

    def _rounds(self, node: Node, result: RowTensor, placed: Placed) -> bool:
        """Whether a sum over rows, or a product with their number, becomes integers."""
        if _dtype(result).startswith(("float", "bfloat", "complex")):
            return False
        given = tensors_in((node.args, node.kwargs))
        known = [self.known[x.index] for x in given if _dtype(x) != _dtype(result)]
        is_linear = placed.is_sum or placed.power
        return is_linear and any(each.is_sum or each.power for each in known)

    def _by_rule(self, nodes: tuple[Node, ...]) -> Any:
        first, step = nodes[0], Step(nodes, self)
        if first.number is not None:
            return RULES["row_wise"](step)
        found = RULES.get(first.name)
        if found is None:
            return mixed("has no rule")
        self._compare_attributes(nodes)
        if first.operation is not None and first.name not in _OF_SHAPES:
            for placed in step.placed(*_OPERANDS.get(first.name, ())):
                if placed.is_mixed:
                    return placed
        return found(step)

    def _compare_attributes(self, nodes: tuple[Node, ...]) -> None:
        attributes = [_attributes(node) for node in nodes]
        if any(not are_equal(attributes[0], other) for other in attributes[1:]):
            raise MixesRows("has an attribute that depends on the number of rows")
        is_known = nodes[0].name in TENSORS_AS_ATTRIBUTES
        if not is_known and tensors_in(list(attributes[0].values())):
            raise MixesRows("has a tensor for an attribute")


def _dtype(tensor: RowTensor) -> str:
    return keras.backend.standardize_dtype(tensor.dtype)  # type: ignore[no-any-return]


def _attributes(node: Node) -> dict[str, Any]:
    if node.operation is None:
        return node.kwargs
    varying = _VARYING.get(node.name)
    return {
        name: value
        for name, value in vars(node.operation).items()
        if not name.startswith("_") and name not in ("name", varying)
    }
