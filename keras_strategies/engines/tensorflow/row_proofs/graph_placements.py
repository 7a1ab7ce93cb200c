"""Placements of tensors in a graph: how values of replicas form the global batch's.

More than `RowPlacement` has to be followed inside of a graph: rows that are at another
axis for a while, values divided by the number of rows, sizes computed from it, lists of
tensors. For a call with B rows of which replica r has b_r:

| kind | the value t of the call follows from values t_r of replicas |
|---|---|
| `SAME` | `t = B**power * c` and `t_r = b_r**power * c`, with one c |
| `ROWS` | `t / B**power` is the concatenation of `t_r / b_r**power` along an axis |
| `PART` | `t / B**power` is the sum of `t_r / b_r**power`; power -1 is a mean |
| `COUNT` | another function of the number of rows, the same for B and b_r |
| `LIST` | a `TensorList`, with the placement of its elements |
| `HANDLE` | a resource: a variable, a table |
| `MIXED`, `UNKNOWN` | as `RowKind` |
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np


class Kind(enum.Enum):
    SAME = "the same"
    ROWS = "rows"
    PART = "a sum over rows"
    COUNT = "a function of the number of rows"
    LIST = "a list"
    HANDLE = "a resource"
    MIXED = "mixed"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class GraphPlacement:
    """The placement of one tensor of a graph.

    Args:
        kind: Kind.
        power: int, the power of the number of rows; see above.
        axis: int, the axis of the rows. It has `outer * rows * multiple` entries.
        multiple: int, consecutive entries of the axis for each row.
        outer: int, how often all rows are repeated along the axis, as they are between
            `SpaceToBatchND` and `BatchToSpaceND`.
        offset: int, for row numbers that address entries of flattened rows: by how much
            each row adds to the number. Each replica may count from 0.
        is_zero: bool, whether it is a literal zero of the program, neutral in a sum.
        is_counted: bool, whether known values are computed from the number of rows.
        values: the known values of a small tensor, an array for each number of rows;
            None if unknown.
        element: placement of the elements of a list; None for an empty list.
        element_sizes: their shape, None where it is unknown.
        least: known values that the tensor's values are not less than.
        cause: str, the operation that mixes rows, or that has no rule.
    """

    kind: Kind = Kind.SAME
    power: int = 0
    axis: int = 0
    multiple: int = 1
    outer: int = 1
    offset: int = 0
    is_zero: bool = False
    is_counted: bool = field(default=False, compare=False)
    values: tuple[Any, ...] | None = field(default=None, compare=False)
    element: GraphPlacement | None = None
    element_sizes: tuple[int | None, ...] | None = field(default=None, compare=False)
    least: tuple[Any, ...] | None = field(default=None, compare=False)
    cause: str = field(default="", compare=False)

    @property
    def is_lost(self) -> bool:
        """Whether the value for the global batch does not follow from replicas'."""
        return self.kind in (Kind.MIXED, Kind.UNKNOWN)

    @property
    def is_plain(self) -> bool:
        """Whether it is the same on all replicas, whatever their numbers of rows."""
        return self.kind is Kind.SAME and not self.power

    @property
    def has_rows(self) -> bool:
        return self.kind is Kind.ROWS

    def but(self, **changes: Any) -> GraphPlacement:
        return dataclasses.replace(self, **changes)

    def without_values(self) -> GraphPlacement:
        return self if self.values is None else self.but(values=None)

    def __str__(self) -> str:
        if self.kind is Kind.ROWS:
            text = "rows" if not self.axis else f"rows along axis {self.axis}"
        elif self.kind is Kind.PART and self.power == -1:
            return "a mean over rows"
        else:
            text = self.kind.value
        if not self.power:
            return text
        if self.kind is Kind.SAME and self.power == 1:
            return "a multiple of the number of rows"
        return f"{text} times the number of rows to the power {self.power}"


SAME = GraphPlacement()
ROWS = GraphPlacement(Kind.ROWS)
PART = GraphPlacement(Kind.PART)
ZERO = GraphPlacement(is_zero=True)
HANDLE = GraphPlacement(Kind.HANDLE)


class MixesRowsError(Exception):
    """An operation whose result does not follow from those of replicas."""


class NoRuleError(Exception):
    """An operation without a rule, or outside of what its rule covers."""


def are_equal(one: Any, other: Any) -> bool:
    """Whether arrays are equal; entries that are not a number equal each other."""
    return np.array_equal(one, other, equal_nan=one.dtype.kind in "fc")


def of_values(values: Sequence[Any], counts: Sequence[int]) -> GraphPlacement:
    """The placement of a small tensor that is known for each number of rows.

    Args:
        values: arrays.
        counts: the numbers of rows.
    """
    known = tuple(values)
    first = known[0]
    if any(value.shape != first.shape for value in known):
        return GraphPlacement(Kind.COUNT, values=known, is_counted=True)
    is_number = first.dtype.kind in "iuf"
    if all(are_equal(value, first) for value in known[1:]):
        is_zero = is_number and not first.any()
        return GraphPlacement(values=known, is_zero=is_zero)
    tolerance = 1e-5 if first.dtype.kind == "f" else 1e-12
    for power in (1, -1, 2, -2) if is_number else ():
        factors = [
            value / float(count) ** power
            for value, count in zip(known, counts, strict=True)
        ]
        if all(
            np.allclose(factor, factors[0], rtol=tolerance, atol=0)
            for factor in factors[1:]
        ):
            return GraphPlacement(power=power, values=known, is_counted=True)
    return GraphPlacement(Kind.COUNT, values=known, is_counted=True)


def row_axis(
    shapes: Sequence[Sequence[int]], counts: Sequence[int]
) -> GraphPlacement | None:
    """The one axis that has a multiple of the rows, as a placement of rows.

    Args:
        shapes: the shape for each number of rows.
        counts: the numbers of rows.

    Returns:
        GraphPlacement; None if no axis depends on the number of rows.

    Raises:
        MixesRowsError: if the shape depends on it in another way.
    """
    if len({len(shape) for shape in shapes}) > 1:
        raise MixesRowsError("its rank depends on the number of rows")
    varying = [
        k for k, sizes in enumerate(zip(*shapes, strict=True)) if len(set(sizes)) > 1
    ]
    if not varying:
        return None
    axis = varying[0]
    multiple = int(shapes[0][axis]) // counts[0]
    is_multiple = all(
        int(shape[axis]) == multiple * count
        for shape, count in zip(shapes, counts, strict=True)
    )
    if len(varying) > 1 or not is_multiple:
        raise MixesRowsError("its shape is no multiple of the number of rows")
    return GraphPlacement(Kind.ROWS, axis=axis, multiple=multiple)


def joined(first: GraphPlacement, second: GraphPlacement) -> GraphPlacement:
    """The placement of a value that comes from one of two places, as in a loop.

    Raises:
        MixesRowsError: if they are placed differently.
    """
    if first.is_lost or second.is_lost:
        return first if first.is_lost else second
    if first.kind is second.kind is Kind.LIST:
        if first.element is None or second.element is None:
            return second if first.element is None else first
        return first.but(
            element=joined(first.element, second.element),
            element_sizes=first.element_sizes or second.element_sizes,
        )
    if first == second:
        return first if _equal_values(first, second) else first.without_values()
    a, b = (each.but(is_zero=False, values=None) for each in (first, second))
    if a == b or second.is_zero:
        return a
    if first.is_zero:
        return b
    raise MixesRowsError(f"{first} in one case, {second} in another")


def _equal_values(first: GraphPlacement, second: GraphPlacement) -> bool:
    if first.values is None or second.values is None:
        return False
    return all(map(are_equal, first.values, second.values))
