"""Random numbers of a replica's rows in `Strategy.run` on JAX.

The draws of `keras.random` have keys from seeds that all replicas share. A replica
draws for the rows of all replicas, as one device does, and takes those of its rows; XLA
fuses the two, so that what others draw costs arithmetic and no memory. Functions of
`jax.random` have keys from the user's code and are left alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp

from keras_strategies.runtime.data_parallel.draw_lengths import DrawLengths
from keras_strategies.runtime.data_parallel.row_draws import (
    DrawsByLength,
    OwnRows,
    row_draws,
)


def draws_of(
    parts: Sequence[Sequence[Any]],
    replica: Any,
    is_uniform: bool,
    lengths: DrawLengths,
) -> DrawsByLength:
    """The draws of a replica.

    Args:
        parts: for each array argument that replicas do not share, those of all.
        replica: int, the replica; a traced scalar in one trace of all.
        is_uniform: bool, whether all replicas have the same shapes.
        lengths: those of all replicas of the run.
    """
    columns = (part for part in parts if all(each.ndim for each in part))
    rows = next(([each.shape[0] for each in column] for column in columns), None)
    own = None
    if rows is not None and is_uniform:
        own = OwnRows(replica * rows[0], rows[0], sum(rows))
    elif rows is not None:
        own = OwnRows.of(rows, replica)
    return DrawsByLength(lambda: own, lengths)


def drawn(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A function of `keras.random` on the replica that this thread traces."""
    draws = row_draws()
    if draws is None:
        return original(*args, **kwargs)
    bound = inspect.signature(original).bind(*args, **kwargs)
    rows = draws.next_draw(_length(bound.arguments))
    if rows is None:
        return original(*args, **kwargs)
    given = {
        name: (rows.total, *value[1:])
        if name == "shape"
        else value
        if name == "noise_shape"
        else _padded(value, rows)
        for name, value in bound.arguments.items()
    }
    whole = original(**given)
    return lax.dynamic_slice_in_dim(whole, rows.before, rows.own)


def _length(arguments: dict[str, Any]) -> int | None:
    """The length of axis 0 of what a function draws; None without axes."""
    if "shape" in arguments:
        shape = tuple(arguments["shape"])
    elif "logits" in arguments:
        shape = arguments["logits"].shape
    else:
        shape = arguments["inputs"].shape
        noise = arguments.get("noise_shape")
        if noise is not None and noise[0] is not None:
            return None  # All rows share the noise.
    return int(shape[0]) if shape else None


def _padded(value: Any, rows: OwnRows) -> Any:
    """An array of own rows with ones for the others; other values as they are.

    Draws of a row do not depend on the parameters of others: each entry has a key, or a
    place in the sequence of one.
    """
    if not isinstance(value, jax.Array) or not value.ndim or len(value) != rows.own:
        return value
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return value
    whole = jnp.ones((rows.total, *value.shape[1:]), value.dtype)
    return lax.dynamic_update_slice_in_dim(whole, value, rows.before, 0)
