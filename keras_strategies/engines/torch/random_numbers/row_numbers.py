"""Random numbers of a replica's rows on Torch.

A generator of Torch is a sequence: where a number stands in it depends on how many were
drawn before. There are two ways to give a row the same numbers on any number of
replicas:

- draws in blocks of rows, each with a seed of its own (`block_draws.py`);
- the numbers of Keras without a strategy: a replica draws for all rows of the call, as
  one device does, and keeps those of its rows. The cost grows with the replicas.

Draws are those of `keras.random`. What code draws from Torch itself is Torch's own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from keras_strategies.engines.torch.random_numbers.block_draws import block_draw
from keras_strategies.engines.torch.random_numbers.rows_in_memory import padded_rows
from keras_strategies.errors import ContextError
from keras_strategies.runtime.random_numbers import keras_draws
from keras_strategies.runtime.random_numbers.keras_draws import KerasDraw, own_of_all
from keras_strategies.runtime.random_numbers.row_draws import (
    DrawsOfRun,
    OwnRows,
    RowDraws,
    drawing,
)


def seeing_draws() -> contextlib.AbstractContextManager[None]:
    """Context in which draws have the numbers of `row_draws`."""
    return keras_draws.seeing_draws(_drawn)


@contextlib.contextmanager
def partitioned_step() -> Iterator[None]:
    """Context of a step, in which draws outside of layer calls are partitioned."""
    with drawing(DrawsOfRun(lambda: None, is_partitioned=True)), seeing_draws():
        yield


def _drawn(draw: KerasDraw, draws: RowDraws) -> Any:
    """A draw on the replica, or in the step, of this thread."""
    if draws.is_partitioned:
        return block_draw(draw, draws)
    rows = draws.next_draw(draw.length)
    if rows is None or rows.own == rows.total:
        return draw.call()
    if draw.has_parameters_of_rows:
        raise ContextError(
            f"How many random numbers {draw.name!r} draws for a row depends on its "
            "parameters, so a replica cannot skip those of other rows. Make the "
            "strategy with random_numbers='partitioned', or draw outside of `run` and "
            "pass the numbers as an argument."
        )
    if draw.name == "dropout":
        return _dropout(draw, rows)
    return own_of_all(draw, rows, _padded, _own)


def _dropout(draw: KerasDraw, rows: OwnRows) -> torch.Tensor:
    """Dropout by a factor for each entry, so that only own rows are stored."""
    inputs = draw.given["inputs"]
    ones = torch.ones_like(inputs, requires_grad=False)
    other = KerasDraw(draw.function, {**draw.given, "inputs": ones})
    with torch.no_grad():
        factors = own_of_all(other, rows, padded_rows, _own)
    return inputs * factors  # type: ignore[no-any-return]


def _own(drawn: torch.Tensor, rows: OwnRows) -> torch.Tensor:
    """A copy of own rows, so that the rest is freed."""
    return drawn.narrow(0, rows.before, rows.own).clone()


def _padded(value: torch.Tensor, rows: OwnRows) -> torch.Tensor:
    """A tensor of own rows with ones for the others; other tensors as they are."""
    return padded_rows(value, rows) if len(value) == rows.own else value
