"""One operation of a recorded call, as it was with each number of rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from keras_strategies.engines.torch.row_proofs.value_placements import (
    MixesRows,
    Placed,
    Shape,
    power_of_rows,
)
from keras_strategies.runtime.row_proofs.row_placements import RowKind


@dataclass(frozen=True, slots=True)
class Varying:
    """A number, or another argument, that differs with the number of rows."""

    values: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor among the arguments of an operation.

    Args:
        placed: its placement.
        shapes: its shape with each number of rows.
        dtype: its dtype.
        is_dense: whether its memory has its entries in their order, and no others.
        known: for each number of rows its values, if the call computes them from
            numbers of Python alone.
    """

    placed: Placed
    shapes: tuple[Shape, ...]
    dtype: torch.dtype | None = None
    is_dense: bool = False
    known: tuple[torch.Tensor, ...] | None = None

    @property
    def rank(self) -> int:
        return len(self.shapes[0])

    @property
    def shape(self) -> Shape:
        """Its shape with the first number of rows."""
        return self.shapes[0]

    def size(self, axis: int) -> int:
        return self.shapes[0][axis]

    def has_row_numbers(self, axis: int, counts: Sequence[int]) -> bool:
        """Whether it is the numbers of the rows along an axis, equal along others."""
        if self.known is None or axis >= self.rank:
            return False
        return all(
            known.shape[axis] == rows and bool((known == _numbers(known, axis)).all())
            for known, rows in zip(self.known, counts, strict=True)
        )


def _numbers(like: torch.Tensor, axis: int) -> torch.Tensor:
    shape = [-1 if i == axis else 1 for i in range(like.dim())]
    return torch.arange(like.shape[axis]).reshape(shape)


@dataclass(slots=True)
class Operation:
    """An operation with its arguments by name, tensors as `Operand`s.

    Args:
        name: its name in ATen without overload, and without the underscore of one that
            changes its argument.
        arguments: the arguments by name, with defaults.
        results: the shapes of each result with each number of rows; None for a result
            that is no tensor.
        dtypes: the dtypes of the results.
        counts: the numbers of rows.
        draws: whether it draws random numbers.
    """

    name: str
    arguments: dict[str, Any]
    results: tuple[tuple[Shape, ...] | None, ...]
    dtypes: tuple[torch.dtype | None, ...]
    counts: tuple[int, ...]
    draws: bool = False
    operands: list[Operand] = field(default_factory=list)

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def get(self, name: str, default: Any = None) -> Any:
        return self.arguments.get(name, default)

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """The shapes of the first result."""
        found = self.results[0]
        assert found is not None
        return found

    @property
    def rank(self) -> int:
        return len(self.shapes[0])

    def axis(self, name: str, rank: int) -> int:
        """An argument that is an axis, counted from 0."""
        value = self.arguments[name]
        return int(value) % rank if rank else 0

    def axes(self, name: str, rank: int) -> list[int]:
        """An argument that is one axis, several, or None for all."""
        value = self.arguments.get(name)
        if value is None or value == []:
            return list(range(rank))
        values = value if isinstance(value, (list, tuple)) else [value]
        return [int(v) % rank for v in values] if rank else []

    def of_number(self, value: Any) -> Operand:
        """An operand for an argument that is a number."""
        values = value.values if isinstance(value, Varying) else (value,)
        power = 0 if len(values) == 1 else power_of_rows(values, self.counts)
        is_zero = all(v == 0 for v in values)
        placed = Placed(RowKind.SAME, power=power, is_zero=is_zero)
        return Operand(placed, ((),) * len(self.counts))

    def operand(self, name: str) -> Operand:
        """A tensor argument, or a number as an operand."""
        value = self.arguments[name]
        return value if isinstance(value, Operand) else self.of_number(value)

    def values_of(self, value: Any) -> tuple[Any, ...]:
        """An argument with each number of rows."""
        if isinstance(value, Varying):
            return value.values
        return (value,) * len(self.counts)

    def require_equal(self, *names: str) -> None:
        """Raises unless tensor arguments are equal for any number of rows."""
        for name in names:
            value = self.arguments.get(name)
            for operand in value if isinstance(value, list) else [value]:
                if isinstance(operand, Operand) and not operand.placed.is_equal:
                    raise MixesRows(f"with {_described(operand.placed)} as its {name}")


def _described(placed: Placed) -> str:
    if placed.is_rows:
        return "rows"
    return "a sum over rows" if placed.is_sum else "the number of rows"
