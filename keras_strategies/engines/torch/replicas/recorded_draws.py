"""The draws of a layer call, recorded for its proof."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from keras_strategies.engines.torch.random_numbers.row_numbers import seeing_draws
from keras_strategies.runtime.random_numbers.keras_draws import (
    KerasDraw,
    RecordedDraws,
)
from keras_strategies.runtime.random_numbers.row_draws import drawing


@dataclass(frozen=True)
class RecordedDraw:
    """One draw, with some number of rows.

    Args:
        name: str, the function.
        shape: of what is drawn.
        has_parameters: whether the number of numbers depends on parameters of rows.
    """

    name: str
    shape: tuple[int, ...]
    has_parameters: bool


class DrawRecorder(RecordedDraws):
    """Context that records the draws of a call.

    Args:
        observer: its attribute `is_drawing` is True during a draw; None without one.

    Attributes:
        draws: the draws in their order.
    """

    def __init__(self, observer: Any = None) -> None:
        super().__init__()
        self._observer = observer
        self._stack = contextlib.ExitStack()
        self.draws: list[RecordedDraw] = []

    def __enter__(self) -> DrawRecorder:
        self._stack.enter_context(drawing(self))
        self._stack.enter_context(seeing_draws())
        return self

    def __exit__(self, *exception: Any) -> None:
        self._stack.close()

    def recorded(self, draw: KerasDraw) -> Any:
        if self._observer is not None:
            self._observer.is_drawing = True
        try:
            found = draw.call()
        finally:
            if self._observer is not None:
                self._observer.is_drawing = False
        shape = tuple(map(int, draw.shape))
        self.draws.append(RecordedDraw(draw.name, shape, draw.has_parameters_of_rows))
        return found


class DrawsDiffer(Exception):
    """Why the random numbers of a call are not those of its rows."""


def multiples_of(
    counts: Sequence[int],
    recorded: Sequence[Sequence[RecordedDraw]],
    is_partitioned: bool,
) -> tuple[int, ...]:
    """For each draw of a call its entries for each row; see `RowProof.draws`.

    Args:
        counts: numbers of rows, not all equal.
        recorded: the draws with each of these numbers.
        is_partitioned: bool, whether rows draw from generators of their own, if how
            many numbers they take depends on parameters.

    Raises:
        DrawsDiffer: if there are more draws with some numbers, or a draw has rows along
            another axis or depends on parameters.
    """
    if len(set(map(len, recorded))) > 1:
        raise DrawsDiffer("how many random numbers it draws depends on the rows")
    return tuple(
        _multiple(counts, column, is_partitioned)
        for column in zip(*recorded, strict=True)
    )


def _multiple(
    counts: Sequence[int], column: Sequence[RecordedDraw], is_partitioned: bool
) -> int:
    first = column[0]
    shapes = [draw.shape for draw in column]
    if any(draw.name != first.name for draw in column):
        raise DrawsDiffer("which random numbers it draws depends on the rows")
    if all(shape == first.shape for shape in shapes):
        return 0
    where = f"random numbers of '{first.name}'"
    if any(shape[1:] != first.shape[1:] for shape in shapes):
        raise DrawsDiffer(f"{where} have rows along another axis than the first")
    multiple = first.shape[0] // counts[0]
    lengths = [shape[0] for shape in shapes]
    if multiple < 1 or lengths != [multiple * count for count in counts]:
        raise DrawsDiffer(f"the length of {where} is not a multiple of the rows")
    if first.has_parameters and not is_partitioned:
        raise DrawsDiffer(f"{where} depend on the parameters of rows before them")
    return multiple
