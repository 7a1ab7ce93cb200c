"""Random numbers of a replica's rows in `Strategy.run` on JAX.

The draws of `keras.random` have keys from seeds that all replicas share. A replica
draws for the rows of all replicas, as one device does, and takes those of its rows; XLA
fuses the two, so that what others draw costs arithmetic and no memory. Functions of
`jax.random` have keys from the user's code and are left alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp

from keras_strategies.runtime.random_numbers.keras_draws import KerasDraw, own_of_all
from keras_strategies.runtime.random_numbers.row_draws import (
    DrawsOfRun,
    OwnRows,
    RowDraws,
)


def draws_of(parts: Sequence[Sequence[Any]], replica: Any) -> DrawsOfRun:
    """The draws of a replica in the trace of all, which have equal shapes.

    Args:
        parts: for each array argument that replicas do not share, those of all.
        replica: scalar of the trace, the replica.
    """
    every = rows_of_parts(parts)
    own = OwnRows(replica * every[0], every[0], sum(every)) if every else None
    return DrawsOfRun(lambda: own)


def rows_of_parts(parts: Sequence[Sequence[Any]]) -> list[int]:
    """The rows of each replica, of the first argument with rows; empty without one."""
    for every in parts:
        if all(each.ndim for each in every):
            return [each.shape[0] for each in every]
    return []


def drawn(draw: KerasDraw, draws: RowDraws) -> Any:
    """A draw on the replica that this thread traces."""
    rows = draws.next_draw(draw.length)
    return draw.call() if rows is None else own_of_all(draw, rows, _padded, _own)


def _own(value: Any, rows: OwnRows) -> Any:
    return lax.dynamic_slice_in_dim(value, rows.before, rows.own)


def _padded(value: Any, rows: OwnRows) -> Any:
    """An array of own rows with ones for the others; other values as they are.

    Draws of a row do not depend on the parameters of others: each entry has a key, or a
    place in the sequence of one.
    """
    if not isinstance(value, jax.Array) or not value.ndim or len(value) != rows.own:
        return value
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return value
    every = jnp.ones((rows.total, *value.shape[1:]), value.dtype)
    return lax.dynamic_update_slice_in_dim(every, value, rows.before, 0)
