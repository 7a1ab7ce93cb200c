"""One operation in all traces of a call, and the table of rules."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import keras
import numpy as np

from keras_strategies.keras_compat.structures import leaves_of
from keras_strategies.rows.placed import (
    Counts,
    MixesRows,
    Placed,
    Shape,
    mixed,
    varying_axis,
)
from keras_strategies.rows.row_tensors import is_number, shape_of
from keras_strategies.rows.trace import Node

#: Returns the placement of all results, or one for each.
Rule = Callable[["Step"], Any]
#: By the name of a kind of operations.
RULES: dict[str, Rule] = {}
#: Attributes of operations that are further arguments.
TENSORS_AS_ATTRIBUTES = {"Clip": ("x_min", "x_max"), "GaussianBlur": ("sigma",)}


class Placements(Protocol):
    """The placements of all tensors of the traces, as `Propagation`."""

    counts: Counts
    is_any: bool

    def placed(self, values: Sequence[Any]) -> list[Placed]: ...

    def columns(self, values: Sequence[Any]) -> list[tuple[Any, ...]]: ...

    def of_leaf(self, leaves: Sequence[Any]) -> Placed: ...

    def body(self, step: Step, number: int, placed: list[Placed]) -> list[Placed]: ...

    def are_row_numbers(self, values: Sequence[Any]) -> bool: ...


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Registers a function as the rule of operations.

    Args:
        names: their names, divided by blanks.
    """

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(" ".join(names).split(), function))
        return function

    return register


def of_axis(names: str, argument: str = "x") -> Callable[[Any], Any]:
    """Registers a rule for where the rows are along an axis of one argument.

    Args:
        names: see `rule`.
        argument: str, its name. Without rows the result is placed as it is.
    """

    def register(function: Callable[[Step, Placed], Any]) -> Any:
        @rule(names)
        def apply(step: Step) -> Any:
            (placed,) = step.placed(argument)
            return function(step, placed) if placed.is_rows else placed

        return function

    return register


@functools.cache
def _signature(kind: Any) -> inspect.Signature:
    return inspect.signature(kind.call)


class Step:
    """One operation in all traces, with the placements of its arguments.

    Args:
        nodes: the operation in each trace.
        placements: those of the tensors before it.
    """

    def __init__(self, nodes: tuple[Node, ...], placements: Placements):
        self.nodes = nodes
        self.name = nodes[0].name
        self.placements = placements
        self.counts = placements.counts
        self.arguments = [_bound(node) for node in nodes]

    def values(self, name: str) -> list[Any]:
        """An argument in each trace."""
        return [arguments.get(name) for arguments in self.arguments]

    def static(self, name: str) -> Any:
        """An argument that is equal in all traces."""
        values = self.values(name)
        placed = self.placements.placed(values)
        if not all(each.is_constant for each in placed):
            raise MixesRows("has an argument that depends on rows or their number")
        return values[0]

    def attribute(self, name: str, default: Any = None) -> Any:
        """An attribute of the operation in the first trace."""
        return getattr(self.nodes[0].operation, name, default)

    @property
    def axis(self) -> Any:
        """The axis or axes along which the operation goes."""
        fixed = {"Fliplr": 1, "Flipud": 0, "InTopK": -1, "TopK": -1}
        axis = self.attribute("axis", fixed.get(self.name))
        return self.attribute("axes", axis)

    def placed(self, *names: str) -> list[Placed]:
        """The placements of the leaves of arguments, without None; all by default."""
        return [placed for placed, _ in self.leaves(*names)]

    def leaves(self, *names: str) -> list[tuple[Placed, int]]:
        """Placements of the leaves of arguments with their numbers of axes."""
        found: list[tuple[Placed, int]] = []
        for name in names or self.arguments[0]:
            leaves = [x for x in leaves_of(self.values(name)[0]) if x is not None]
            ranks = [len(shape_of(x)) for x in leaves]
            placed = self.placements.placed(self.values(name))
            found += zip(placed, ranks, strict=True)
        return found

    def given(self, position: int) -> list[Placed]:
        """The placements of an argument of what a trace makes itself."""
        return self.placements.placed([node.args[position] for node in self.nodes])

    def body(self, number: int, placed: list[Placed]) -> list[Placed]:
        """The placements of the results of one of its functions."""
        return self.placements.body(self, number, placed)

    def shapes(self, name: str) -> list[Shape]:
        return [shape_of(value) for value in self.values(name)]

    def out_shapes(self, i: int = 0) -> list[Shape]:
        return [shape_of(leaves_of(node.outputs)[i]) for node in self.nodes]

    def moved(self, placed: Placed) -> Placed:
        """A placement with the rows along the axis of the result that has them."""
        if not placed.is_rows:
            return placed
        axis = varying_axis(self.out_shapes())
        return mixed("loses the rows") if axis is None else placed.at(axis)

    def rank(self, name: str) -> int:
        return len(self.shapes(name)[0])

    @property
    def out_rank(self) -> int:
        return len(self.out_shapes()[0])


def _bound(node: Node) -> dict[str, Any]:
    """The arguments of an operation by their names."""
    if node.operation is None or isinstance(node.operation, keras.layers.Layer):
        return {"given": (node.args, node.kwargs)}
    signature = _signature(type(node.operation))
    bound = signature.bind(node.operation, *node.args, **node.kwargs).arguments
    del bound["self"]
    if node.name != "GetItem":
        bound = {name: numbers_as_array(value) for name, value in bound.items()}
    more = TENSORS_AS_ATTRIBUTES.get(node.name, ())
    return bound | {name: getattr(node.operation, name) for name in more}


def numbers_as_array(value: Any) -> Any:
    """Nested lists of numbers, such as indices, as an array."""
    if isinstance(value, (list, tuple)) and value:
        leaves = leaves_of(value)
        if all(map(is_number, leaves)):
            return np.asarray(value)
    return value
