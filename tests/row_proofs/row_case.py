"""A layer call and the placements of its results that its proof has to find."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from keras import ops

from keras_strategies.rows.row_placements import (
    ROWS,
    RowKind,
    RowPlacement,
)
from row_proofs.case_layers import AddLoss, Apply

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
        if self.dtype == "bool":
            return random.integers(0, 2, shape).astype(bool)
        return random.integers(0, 4, shape).astype(self.dtype)


@dataclass(frozen=True)
class RowCase:
    """A layer call with the expected result of its proof.

    Args:
        name: str.
        make: returns the layer, not built.
        arguments: the arguments of the call.
        outputs: placements of the outputs.
        losses: placements of the losses that the call adds.
        updates: placements of the values that the call assigns to weights, in the
            order of the layer's variables; without the states of seeds.
        problem: bool, whether the call cannot be split.
        draws: bool, whether random numbers of the rows are drawn.
    """

    name: str
    make: Callable[[], Any]
    arguments: tuple[Argument, ...]
    outputs: tuple[RowPlacement | None, ...] = (ROWS,)
    losses: tuple[RowPlacement, ...] = ()
    updates: tuple[RowPlacement, ...] = ()
    problem: bool = False
    draws: bool = False


def rows(name: str, make: Callable[[], Any], *shapes: Any, **expected: Any) -> RowCase:
    return RowCase(name, make, tuple(map(as_argument, shapes or [(6,)])), **expected)


def mixing(name: str, make: Callable[[], Any], *shapes: Any) -> RowCase:
    arguments = tuple(map(as_argument, shapes or [(6,)]))
    return RowCase(name, make, arguments, problem=True)


def as_argument(shape: Any) -> Argument:
    return shape if isinstance(shape, Argument) else Argument(shape)


def function(
    name: str, apply: Callable[..., Any], *shapes: Any, **expected: Any
) -> RowCase:
    return rows(name, lambda: Apply(apply), *shapes, **expected)


def mixing_function(name: str, apply: Callable[..., Any], *shapes: Any) -> RowCase:
    return mixing(name, lambda: Apply(apply), *shapes)


def loss(name: str, of: Callable[[Any], Any], kind: RowPlacement) -> RowCase:
    return rows(name, lambda: AddLoss(of), (6,), losses=(kind,))


def mixing_loss(name: str, of: Callable[[Any], Any]) -> RowCase:
    return mixing(name, lambda: AddLoss(of), (6,))


def multiple(count: int) -> tuple[RowPlacement]:
    return (RowPlacement(RowKind.ROWS, multiple=count),)


def ids(*shape: int) -> Argument:
    return Argument(shape, "int32")


def whole(*shape: int) -> Argument:
    """An argument without rows."""
    return Argument(shape, has_rows=False)


def row_count(x: Any) -> Any:
    return ops.cast(ops.shape(x)[0], FLOAT)
