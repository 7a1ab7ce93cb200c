"""Placements of the values in a recorded call, and how they meet.

A call is recorded with several numbers of rows n. The placement of a value says how its
value t for all rows follows from those of parts of the rows:

- same: t = c n^p, with one c for every n (p = 0: equal values).
- rows: t / n^p is the concatenation along an axis of those of parts. The axis has
  `blocks * n * multiple` entries, in this order: `[blocks, n, multiple]`.
- sum: t / n^p is the sum of those of parts (p = -1: t is their weighted mean).

A value that is the same with power p is also a sum with power p - 1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from keras_strategies.runtime.row_proofs.row_placements import RowKind, RowPlacement

Shape = tuple[int, ...]


class MixesRows(Exception):
    """An operation whose result depends on the rows in another way.

    Args:
        detail: str, the end of the sentence "'operation' ...".
    """


class NoRule(Exception):
    """An operation, or a use of one, that no rule describes."""


@dataclass(frozen=True, slots=True)
class Placed:
    """The placement of a value in a recorded call.

    Args:
        kind: RowKind; `SUM` is a mean if its power is -1.
        axis: int, the axis with the rows.
        multiple: int, entries of the axis for each row.
        blocks: int, how often the axis has all rows.
        power: int, the power of the number of rows that the value is divided by.
        is_zero: bool, whether it is zero whatever the values are.
        reason: str, for `MIXED` and `UNKNOWN`: see `RowPlacement`.
        offset: int, for `MIXED` numbers of entries, by how much those of each row are
            larger than those of the row before; each replica may count from 0.
    """

    kind: RowKind
    axis: int = 0
    multiple: int = 1
    blocks: int = 1
    power: int = 0
    is_zero: bool = False
    reason: str = ""
    offset: int = 0

    @property
    def is_same(self) -> bool:
        return self.kind is RowKind.SAME

    @property
    def is_rows(self) -> bool:
        return self.kind is RowKind.ROWS

    @property
    def is_sum(self) -> bool:
        return self.kind is RowKind.SUM

    @property
    def is_joined(self) -> bool:
        """Whether its value for all rows follows from those of parts."""
        return self.kind not in (RowKind.MIXED, RowKind.UNKNOWN)

    @property
    def is_equal(self) -> bool:
        """Whether it is equal for any number of rows."""
        return self.kind is RowKind.SAME and self.power == 0

    @property
    def layout(self) -> tuple[int, int]:
        """Which rows the entries of the axis belong to."""
        return self.blocks, self.multiple

    def changed(self, **changes: object) -> Placed:
        """A copy with other fields."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]

    def at(self, axis: int) -> Placed:
        """The same with its rows along another axis."""
        if not self.is_rows or self.axis == axis:
            return self
        return self.changed(axis=axis)

    def length(self, rows: int) -> int:
        """The entries of the axis with the rows."""
        return self.blocks * rows * self.multiple

    def fits(self, shapes: Sequence[Shape], counts: Sequence[int]) -> bool:
        """Whether a value has these shapes with these numbers of rows."""
        first = shapes[0]
        if not self.is_rows:
            return all(shape == first for shape in shapes[1:])
        if self.axis >= len(first):
            return False
        return all(
            len(shape) == len(first)
            and all(
                size == (self.length(rows) if axis == self.axis else first[axis])
                for axis, size in enumerate(shape)
            )
            for shape, rows in zip(shapes, counts, strict=True)
        )

    def joined(self) -> RowPlacement:
        """How replicas' results are joined."""
        if not self.is_joined:
            return RowPlacement(self.kind, reason=self.reason)
        if self.is_sum and self.power == -1:
            return RowPlacement(RowKind.MEAN)
        if self.is_same and self.power == 1:
            # Such as the number of rows itself.
            return RowPlacement(RowKind.SUM)
        if self.is_rows and (self.axis, self.blocks) != (0, 1):
            return RowPlacement(
                RowKind.MIXED, reason=f"its rows are not the first axis, but {self}"
            )
        if self.power and not self.is_zero:
            return RowPlacement(
                RowKind.MIXED, reason="a result depends on the number of rows"
            )
        return RowPlacement(self.kind, self.multiple)

    def is_gradient(self, power: int, of_rows: bool) -> bool:
        """Whether it is the gradient that is summed, or concatenated, over replicas.

        Args:
            power: int, the power of the number of rows of what is differentiated.
            of_rows: bool, for an argument with rows.
        """
        if of_rows:
            return (
                self.is_rows
                and (self.axis, self.layout) == (0, (1, 1))
                and (self.power == power or self.is_zero)
            )
        return (
            self.is_zero
            or (self.is_sum and self.power == power)
            or (self.is_same and self.power == power + 1)
        )

    def __str__(self) -> str:
        if self.is_rows:
            return f"axis {self.axis} (of {self.blocks} x rows x {self.multiple})"
        return self.kind.value


SAME = Placed(RowKind.SAME)
ZERO = Placed(RowKind.SAME, is_zero=True)
SUM = Placed(RowKind.SUM)


def rows_of_shapes(shapes: Sequence[Shape], counts: Sequence[int]) -> Placed:
    """The placement of a tensor that is filled alike for each row.

    Args:
        shapes: its shape with each number of rows.
        counts: the numbers of rows.

    Raises:
        MixesRows: if the shape depends on the rows in another way.
    """
    first = shapes[0]
    if all(shape == first for shape in shapes[1:]):
        return SAME
    if all(len(shape) == len(first) for shape in shapes[1:]):
        axes = [i for i, sizes in enumerate(zip(*shapes, strict=True)) if _vary(sizes)]
        size = first[axes[0]]
        if len(axes) == 1 and size % counts[0] == 0:
            placed = Placed(RowKind.ROWS, axes[0], size // counts[0])
            if placed.fits(shapes, counts):
                return placed
    raise MixesRows("has a size that depends on the number of rows")


def power_of_rows(numbers: Sequence[float], counts: Sequence[int]) -> int:
    """The power of the number of rows that numbers are proportional to.

    Raises:
        MixesRows: if there is none.
    """
    if not _vary(numbers):
        return 0
    for power in (1, -1, 2, -2):
        units = [
            n / float(rows) ** power for n, rows in zip(numbers, counts, strict=True)
        ]
        if all(abs(unit - units[0]) <= 1e-7 * abs(units[0]) for unit in units):
            return power
    raise MixesRows("with the number of rows")


def _vary(values: Sequence[float]) -> bool:
    return any(value != values[0] for value in values[1:])
