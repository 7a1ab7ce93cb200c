"""A layer call and the placements of its results that its proof has to find."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from keras import ops

from keras_strategies.rows.row_placements import ROWS, RowKind, RowPlacement
from row_proofs.case_layers import Apply

#: Rows of the batch, and of each replica.
BATCH = 8
SIZES = (5, 3)
FLOAT = "float32"


@dataclass(frozen=True)
class Argument:
    """A positional argument of the call: its shape without rows, dtype, placement."""

    shape: tuple[int, ...]
    dtype: str = FLOAT
    has_rows: bool = True

    def value(self, rows: int, random: np.random.Generator) -> Any:
        shape = (rows, *self.shape) if self.has_rows else self.shape
        if self.dtype == FLOAT:
            return random.normal(size=shape).astype(FLOAT)
        if self.dtype == "string":
            return random.choice(["a", "b", "z"], shape).astype(object)
        return random.integers(0, 2 if self.dtype == "bool" else 4, shape, self.dtype)


@dataclass(frozen=True)
class RowCase:
    """A call of a layer with the placements that its proof finds, or a problem.

    Updates are those of values that the call assigns, in the order of the layer's
    variables without seeds; draws the entries of each draw for each row.
    """

    make: Callable[[], Any]
    arguments: tuple[Argument, ...]
    outputs: tuple[RowPlacement | None, ...] = (ROWS,)
    losses: tuple[RowPlacement, ...] = ()
    updates: tuple[RowPlacement, ...] = ()
    problem: bool = False
    draws: tuple[int, ...] = ()

    @property
    def has_rows(self) -> list[bool]:
        return [argument.has_rows for argument in self.arguments]


def rows(make: Callable[[], Any], *shapes: Any, **expected: Any) -> RowCase:
    """A case of arguments, or of their shapes without rows; of six columns if none."""
    each = (s if isinstance(s, Argument) else Argument(s) for s in shapes or [(6,)])
    return RowCase(make, tuple(each), **expected)


def mixing(make: Callable[[], Any], *shapes: Any) -> RowCase:
    return rows(make, *shapes, problem=True)


def function(apply: Callable[..., Any], *shapes: Any, **expected: Any) -> RowCase:
    return rows(lambda: Apply(apply), *shapes, **expected)


def mixing_function(apply: Callable[..., Any], *shapes: Any) -> RowCase:
    return function(apply, *shapes, problem=True)


def multiple(count: int) -> tuple[RowPlacement]:
    return (RowPlacement(RowKind.ROWS, multiple=count),)


def integers(*shape: int) -> Argument:
    return Argument(shape, "int32")


def whole(*shape: int) -> Argument:
    """An argument without rows."""
    return Argument(shape, has_rows=False)


def row_count(x: Any) -> Any:
    return ops.cast(ops.shape(x)[0], FLOAT)
