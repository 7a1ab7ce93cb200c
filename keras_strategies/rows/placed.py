"""Placements of values in the traces of a call, each for a number n of rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_strategies.rows.row_placements import RowKind, RowPlacement
from keras_strategies.rows.row_tensors import (
    RowTensor,
    is_array,
    is_number,
)

Shape = tuple[int, ...]
#: The numbers of rows of the traces.
Counts = tuple[int, ...]


class MixesRows(Exception):
    """Rows of a result depend on other rows, or on their number, in another way."""


class UnknownUse(Exception):
    """A known layer gets values that its type says nothing about.

    Its argument is the number of the call, whose code is traced in the next try.
    """


@dataclass(frozen=True)
class Placed:
    """How a value t of all rows follows from those of parts of the rows.

    same: t = c n^power. rows: t / n^power is the concatenation along `axis`, whose
    entries are ordered as `[blocks, n, multiple]`. sum: t / n^power is the sum.

    Args:
        kind: RowKind.
        axis: int, the axis of the rows.
        blocks: int, how often the axis has all rows.
        multiple: int, the entries of each row in a block.
        power: int, see above; a mean is a sum of power -1.
        is_zero: bool, whether it is a constant zero, which is a sum as well.
        reason: str, for `MIXED`.
    """

    kind: RowKind
    axis: int = 0
    blocks: int = 1
    multiple: int = 1
    power: int = 0
    is_zero: bool = False
    reason: str = ""

    @property
    def is_rows(self) -> bool:
        return self.kind is RowKind.ROWS

    @property
    def is_sum(self) -> bool:
        return self.kind is RowKind.SUM

    @property
    def is_same(self) -> bool:
        return self.kind is RowKind.SAME

    @property
    def is_constant(self) -> bool:
        """Whether it is the same for any number of rows."""
        return self.is_same and not self.power

    @property
    def is_mixed(self) -> bool:
        return self.kind is RowKind.MIXED

    @property
    def layout(self) -> tuple[int, int]:
        return self.blocks, self.multiple

    def at(self, axis: int) -> Placed:
        """The placement of the rows along another axis."""
        return replace(self, axis=axis) if self.is_rows else self

    def times(self, power: int) -> Placed:
        """The placement of the value times n^power."""
        return replace(self, power=self.power + power) if power else self

    def joined(self) -> RowPlacement:
        """How the results of replicas are joined."""
        if self.is_sum and self.power == -1:
            return RowPlacement(RowKind.MEAN)
        if self.is_same and self.power == 1:
            return RowPlacement(RowKind.SUM)
        if self.is_rows and (self.axis, self.blocks) != (0, 1):
            reason = "the rows of a result are not along its first axis"
            return RowPlacement(RowKind.MIXED, reason=reason)
        if self.power and not self.is_mixed:
            reason = "a result depends on the number of rows"
            return RowPlacement(RowKind.MIXED, reason=reason)
        return RowPlacement(self.kind, self.multiple, self.reason)


SAME, ROWS, SUM = Placed(RowKind.SAME), Placed(RowKind.ROWS), Placed(RowKind.SUM)
ZERO = Placed(RowKind.SAME, is_zero=True)


def mixed(reason: str) -> Placed:
    return Placed(RowKind.MIXED, reason=reason)


def power_of_rows(numbers: Sequence[Any], counts: Counts) -> int:
    """The power of n that numbers, or arrays of one shape, are proportional to."""
    if all(np.array_equal(numbers[0], each) for each in numbers[1:]):
        return 0
    for power in (1, -1, 2, -2):
        units = [
            np.asarray(x) / float(n) ** power
            for x, n in zip(numbers, counts, strict=True)
        ]
        if all(np.allclose(units[0], unit, 1e-6, 0.0) for unit in units[1:]):
            return power
    raise MixesRows("uses a number that depends on how many rows there are")


def varying_axis(shapes: Sequence[Shape]) -> int | None:
    """The axis whose length depends on n; None without one."""
    if len({len(shape) for shape in shapes}) != 1:
        raise MixesRows("has as many axes as the number of rows says")
    columns = enumerate(zip(*shapes, strict=True))
    axes = [i for i, sizes in columns if len(set(sizes)) > 1]
    if len(axes) > 1:
        raise MixesRows("has the rows along two axes")
    return axes[0] if axes else None


def rows_of_shapes(shapes: Sequence[Shape], counts: Counts) -> Placed:
    """The placement of a tensor that is filled alike for each row."""
    axis = varying_axis(shapes)
    if axis is None:
        return SAME
    multiple, rest = divmod(shapes[0][axis], counts[0])
    placed = Placed(RowKind.ROWS, axis, multiple=multiple)
    if rest or not fits(placed, shapes, counts):
        raise MixesRows("has a size that depends on the number of rows")
    return placed


def fits(placed: Placed, shapes: Sequence[Shape], counts: Counts) -> bool:
    """Whether a value with a placement can have these shapes."""
    try:
        axis = varying_axis(shapes)
    except MixesRows:
        return False
    if not placed.is_rows:
        return axis is None
    sizes = [shape[placed.axis] for shape in shapes if placed.axis < len(shape)]
    of_rows = [placed.blocks * n * placed.multiple for n in counts]
    return axis in (None, placed.axis) and sizes == of_rows


def place_constant(values: Sequence[Any], counts: Counts) -> Placed:
    """The placement of what is no tensor of the traces, by its value in each trace."""
    first = values[0]
    if not all(is_array(value) or is_number(value) for value in values):
        if all(are_equal(first, value) for value in values[1:]):
            return SAME
        raise MixesRows("has an argument that depends on the number of rows")
    arrays = [as_array(value) for value in values]
    if len({array.shape for array in arrays}) == 1:
        power = power_of_rows(arrays, counts)
        return replace(SAME if np.any(arrays[0]) else ZERO, power=power)
    placed = rows_of_shapes([array.shape for array in arrays], counts)
    parts = [np.unique(array, axis=placed.axis) for array in arrays]
    if any(part.shape[placed.axis] != 1 for part in parts):
        raise MixesRows("uses a constant with another value for each row")
    power = power_of_rows(parts, counts)
    return replace(placed, power=power, is_zero=not np.any(parts[0]))


def as_array(value: Any) -> np.ndarray:
    """A number or tensor as an array."""
    if ops.is_tensor(value):
        # NumPy has no such dtype.
        is_bfloat16 = keras.backend.standardize_dtype(value.dtype) == "bfloat16"
        value = ops.cast(value, "float32") if is_bfloat16 else value
        return ops.convert_to_numpy(value)  # type: ignore[no-any-return]
    array = np.asarray(value)
    return array.astype("float32") if array.dtype.name == "bfloat16" else array


def are_equal(first: Any, second: Any) -> bool:
    """Whether arguments or attributes of an operation are equal in two traces."""
    if first is second:
        return True
    if isinstance(first, RowTensor) or isinstance(second, RowTensor):
        return type(first) is type(second) and first.index == second.index
    if type(first) is not type(second):
        return False
    if is_array(first):
        a, b = as_array(first), as_array(second)
        return a.shape == b.shape and bool(np.array_equal(a, b))
    if isinstance(first, dict):
        first, second = list(first.items()), list(second.items())
    if isinstance(first, slice):
        first, second = ((s.start, s.stop, s.step) for s in (first, second))
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(are_equal, first, second))
    if callable(first):
        return True  # Functions that are made in the call; their bodies are traced.
    return bool(first == second)


def joined(
    placed: Sequence[tuple[Placed, int]], rank: int, same_power: bool = True
) -> Placed:
    """The placement of a function of entries at the same place, aligned at the end.

    Args:
        placed: placements of the arguments with their numbers of axes.
        rank: int, the number of axes of the result.
        same_power: bool, whether no argument may depend on the number of rows.
    """
    rows: Placed | None = None
    for each, own_rank in placed:
        if each.is_mixed:
            return each
        if each.is_sum:
            return mixed("is not a linear function of a sum over rows")
        if same_power and each.power and not each.is_zero:
            return mixed("depends on the number of rows")
        if each.is_rows:
            axis = each.axis + rank - own_rank
            moved = replace(each, axis=axis, power=0, is_zero=False)
            if rows is not None and rows != moved:
                return mixed("combines rows with others")
            rows = moved
    return SAME if rows is None else rows


def added(placed: Sequence[tuple[Placed, int]], rank: int) -> Placed:
    """The placement of a function that is linear in its arguments, as `joined`."""
    every = [each for each, _ in placed]
    for total in every:
        if total.is_sum and all(as_sum(each, total.power) for each in every):
            return total
    powers = {each.power for each in every if not each.is_zero}
    if len(powers) > 1:
        return mixed("adds what depends on the number of rows in two ways")
    found = joined(placed, rank, same_power=False)
    return found.times(max(powers, default=0))


def as_sum(placed: Placed, power: int) -> bool:
    """Whether a value is a sum over rows with a power."""
    if placed.is_sum:
        return placed.power == power
    return placed.is_zero or (placed.is_same and placed.power == power + 1)


def either(one: Placed, other: Placed) -> Placed:
    """The placement of a value that has one or the other, by a branch or step."""
    if one.is_zero and not other.is_zero:
        one, other = other, one
    if one == other or replace(one, is_zero=False) == replace(other, is_zero=False):
        return replace(one, is_zero=one.is_zero and other.is_zero)
    if other.is_zero and one.is_sum:
        return one
    return mixed("has a value with rows, or not, by a branch or step")


def not_along(placed: Placed, axis: Any, rank: int) -> Placed:
    """The placement of a function along an axis, which must not be that of the rows."""
    if placed.is_rows and placed.axis in axes_of(axis, rank):
        return mixed("goes along the rows")
    return placed


def axes_of(axis: Any, rank: int) -> list[int]:
    """Axes as positive numbers; all for None."""
    if axis is None:
        return list(range(rank))
    axes = axis if isinstance(axis, (list, tuple)) else [axis]
    return [int(each) % rank for each in axes]
