"""One operation of the graph, with the placements of its inputs, as rules see it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from keras_strategies.engines.tensorflow.row_proofs.graph_placements import (
    GraphPlacement,
    Kind,
    MixesRowsError,
    NoRuleError,
    row_axis,
)

#: Tensors with more entries have no known values.
SMALL = 1024
Sizes = list[int | None]


class Walk(Protocol):
    """The walk over a graph, as rules of control flow see it."""

    def call(
        self,
        node: Node,
        function: str | None,
        inputs: Sequence[GraphPlacement],
        first_argument: int = 0,
    ) -> list[GraphPlacement]:
        """Placements of the results of a function that an operation calls.

        Args:
            node: the operation.
            function: the name of its attribute with the function, and its number where
                that is a list; None for an operation whose type names the function.
            inputs: placements of the arguments.
            first_argument: the number of the input that is the first argument.
        """

    def lost(self, node: Node, error: MixesRowsError | NoRuleError) -> GraphPlacement:
        """The placement of a result of an operation that mixes rows."""


@dataclass
class Facts:
    """What is known about a call besides its operations.

    Args:
        counts: numbers of rows at which sizes are compared.
        are_real: bool, whether the call runs with these numbers of rows only.
        draws: for each graph of the call, the position of each operation among those
            that draw random numbers.
        multiples: entries of axis 0 for each row, by this position; of draws that are
            found to have rows, or that all rows share.
    """

    counts: tuple[int, ...]
    are_real: bool
    draws: Sequence[Mapping[Any, int]] = ()
    multiples: dict[int, int] = field(default_factory=dict)
    # Sizes that TensorFlow did not infer, by `id(tensor)`.
    sizes: dict[int, Sizes] = field(default_factory=dict)

    def apart(self) -> Facts:
        """What is known about the call before its operations are placed."""
        return Facts(self.counts, self.are_real, self.draws)

    def sizes_of(self, tensor: Any) -> Sizes | None:
        """The shape of a tensor at the first number of rows; None for unknown rank."""
        known = self.sizes.get(id(tensor))
        if known is not None:
            return known
        shape = tensor.shape
        return None if shape.rank is None else list(shape.as_list())


@dataclass(frozen=True)
class Node:
    """An operation and its inputs.

    Args:
        walk: the walk.
        facts: Facts.
        operations: the operation in the graph of each number of rows; one for all in a
            graph for any number of rows.
        inputs: placements of its inputs.
    """

    walk: Walk
    facts: Facts
    operations: tuple[Any, ...]
    inputs: tuple[GraphPlacement, ...]

    @property
    def operation(self) -> Any:
        return self.operations[0]

    @property
    def type(self) -> str:
        name: str = self.operation.type
        return name

    @property
    def counts(self) -> tuple[int, ...]:
        return self.facts.counts

    def attribute(self, name: str) -> Any:
        return self.operation.get_attr(name)

    # Shapes.

    def sizes(self, i: int) -> Sizes:
        """The shape of an input at the first number of rows."""
        found = self.facts.sizes_of(self.operation.inputs[i])
        if found is None:
            raise NoRuleError("an input of unknown rank")
        return found

    def rank(self, i: int) -> int:
        return len(self.sizes(i))

    def output_sizes(self, i: int = 0) -> Sizes:
        found = self.facts.sizes_of(self.operation.outputs[i])
        if found is None:
            raise NoRuleError("a result of unknown rank")
        return found

    def output_rank(self) -> int:
        return len(self.output_sizes(0))

    def shapes(self, i: int) -> list[list[int]] | None:
        """The shape of an input for each number of rows; None if it is not known."""
        placement = self.inputs[i]
        if placement.values is not None:
            return [list(value.shape) for value in placement.values]
        if placement.kind is Kind.LIST:
            return None
        tensors = [operation.inputs[i] for operation in self.operations]
        if len(tensors) > 1 and all(t.shape.is_fully_defined() for t in tensors):
            return [list(tensor.shape.as_list()) for tensor in tensors]
        sizes = self.facts.sizes_of(self.operation.inputs[i])
        if sizes is None:
            return None
        found = []
        for count in self.counts:
            shape = list(sizes)
            if placement.has_rows:
                shape[placement.axis] = placement.outer * placement.multiple * count
            if None in shape:
                return None
            found.append([int(size or 0) for size in shape])
        return found

    # Inputs with known values.

    def numbers(self, i: int) -> list[list[int]]:
        """The known integers of an input, for each number of rows."""
        values = self.inputs[i].values
        if values is None:
            raise NoRuleError("sizes that are not known")
        return [[int(entry) for entry in np.ravel(value)] for value in values]

    def axes(self, i: int, rank: int) -> list[int]:
        """An input that numbers axes, of a tensor of such a rank."""
        numbers = self.numbers(i)
        if not self.inputs[i].is_plain:
            raise NoRuleError("axes that depend on the number of rows")
        return [axis % rank if rank else axis for axis in numbers[0]]

    def add_draw(self, result: GraphPlacement) -> GraphPlacement:
        """Notes whether the random numbers that the operation draws have the rows.

        Args:
            result: their placement.

        Raises:
            MixesRowsError: if replicas could not draw those of their rows.
        """
        found = [
            draws.get(operation)
            for draws, operation in zip(self.facts.draws, self.operations, strict=True)
        ]
        position, multiple = found[0], result.multiple if result.has_rows else 0
        if result.has_rows and (result.axis or result.power or result.outer > 1):
            raise MixesRowsError(f"random numbers that are {result}")
        if position is None and not multiple:
            return result
        if position is None or any(other != position for other in found):
            raise MixesRowsError(
                "random numbers of rows, drawn in a `tf.function` or not by "
                "`keras.random` or `tf.random`"
            )
        if self.facts.multiples.setdefault(position, multiple) != multiple:
            raise MixesRowsError("random numbers with rows in one of several calls")
        return result

    def row_axis(self, shapes: Sequence[Sequence[int]]) -> GraphPlacement | None:
        return row_axis(shapes, self.counts)


Result = GraphPlacement | list[GraphPlacement]


@dataclass(frozen=True)
class Rule:
    """How the placements of an operation's results follow from those of its inputs.

    Args:
        apply: callable of the node. One placement stands for all results.
        moves: int, the input that the operation only moves entries of, so that parts of
            a sum stay parts; None for other operations.
        takes_powers: bool, whether inputs may be multiples of the number of rows.
        takes_counts: bool, whether they may be any function of it, as sizes are.
        keeps_outer: bool, whether rows may be repeated along their axis.
        takes_offsets: bool, whether inputs may be numbers of own rows.
        takes_lost: bool, whether inputs may be lost.
        takes_all: bool, whether `apply` gets inputs of every kind, before all else.
    """

    apply: Callable[[Node], Result]
    moves: int | None = None
    takes_powers: bool = False
    takes_counts: bool = False
    keeps_outer: bool = False
    takes_offsets: bool = False
    takes_lost: bool = False
    takes_all: bool = False


def rules(
    names: str, apply: Callable[[Node], Result], **traits: Any
) -> dict[str, Rule]:
    """The same rule for several types of operations, separated by spaces."""
    return dict.fromkeys(names.split(), Rule(apply, **traits))
