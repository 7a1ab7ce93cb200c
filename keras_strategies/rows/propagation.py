"""Placements of all tensors in the traces of a call, by rules for its operations."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Sequence
from typing import Any, cast

import keras
import numpy as np

from keras_strategies.keras_compat.structures import leaves_of
from keras_strategies.rows.exchanges import Exchanges
from keras_strategies.rows.placed import (
    Counts,
    MixesRows,
    Placed,
    Shape,
    are_equal,
    as_array,
    fits,
    mixed,
    place_constant,
    varying_axis,
)
from keras_strategies.rows.row_tensors import (
    RowTensor,
    is_array,
    is_number,
    shape_of,
    tensors_in,
)
from keras_strategies.rows.trace import Node

#: Returns the placement of all results, or one for each.
Rule = Callable[["Step"], Any]
#: By the name of a kind of operations.
RULES: dict[str, Rule] = {}
#: Attributes of operations that are further arguments.
TENSORS_AS_ATTRIBUTES = {"Clip": ("x_min", "x_max"), "GaussianBlur": ("sigma",)}
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
        is_linear = placed.is_sum or placed.power != 0
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


# Rules.


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
def _signature(call: Hashable) -> inspect.Signature:
    return inspect.signature(cast(Callable[..., Any], call))


class Step:
    """One operation in all traces, with the placements of its arguments.

    Args:
        nodes: the operation in each trace.
        placements: those of the tensors before it.
    """

    def __init__(self, nodes: tuple[Node, ...], placements: Propagation):
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
        bodies = [node.bodies[number] for node in self.nodes]
        inputs = [x for x in leaves_of(bodies[0].inputs) if x is not None]
        for tensor, each in zip(inputs, placed, strict=True):
            self.placements.known[tensor.index] = each
        self.placements.run([body.nodes for body in bodies])
        return self.placements.placed([body.outputs for body in bodies])

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
    signature = _signature(type(node.operation).call)
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
