"""The derivative of sorting, with signed indices.

JAX 0.10 numbers the entries with unsigned integers, and the gradient adds to entries at
these numbers. XLA cannot partition that by rows which do not divide over the devices:
a check of its partitioner ends the process. With signed integers it can. Sorting along
any axis is meant, and what JAX and Keras compute by it: `sort`, `median`, `quantile`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp
from jax.interpreters import ad

_LARGEST = jnp.iinfo(jnp.int32).max


def use_signed_indices() -> None:
    """Replaces JAX's derivative of `lax.sort`; the numbers are the same."""
    ad.primitive_jvps[lax.sort_p] = _jvp_of_sort


def _jvp_of_sort(
    primals: Sequence[Any],
    tangents: Sequence[Any],
    *,
    dimension: int,
    is_stable: bool,
    num_keys: int,
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    shape = primals[0].shape
    is_large = shape[dimension] > _LARGEST
    numbers = lax.broadcasted_iota(
        jnp.uint32 if is_large else jnp.int32, shape, dimension
    )
    *found, order = lax.sort_p.bind(
        *primals,
        numbers,
        dimension=dimension,
        is_stable=is_stable,
        num_keys=num_keys,
    )
    moved = tuple(
        tangent if isinstance(tangent, ad.Zero) else _taken(tangent, order, dimension)
        for tangent in tangents
    )
    return tuple(found), moved


def _taken(tangent: Any, order: jax.Array, axis: int) -> jax.Array:
    return jnp.take_along_axis(tangent, order, axis=axis, mode="promise_in_bounds")
