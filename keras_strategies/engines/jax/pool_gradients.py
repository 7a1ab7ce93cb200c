"""The derivative of max pooling in programs over a mesh, where rows are pooled.

XLA partitions the gradient of a pooling window (`select_and_scatter`) wrong along an
axis that is sharded: entries at the edges of shards get other values, without a
message (JAX 0.10). Its operands and its result have such axes whole on each device.
Axes that no window spans, those of rows in pooling layers, stay sharded.
"""

from __future__ import annotations

from typing import Any

import jax
from jax import lax
from jax.interpreters import ad

from keras_strategies.engines.jax.grouped_convolutions import rows_of_program

_installed: list[Any] = []


def use_unsharded_windows() -> None:
    """Replaces JAX's derivative of pooling by a maximum or a minimum."""
    if not _installed:
        _installed.append(ad.primitive_transposes[lax.select_and_gather_add_p])
        ad.primitive_transposes[lax.select_and_gather_add_p] = _transpose


def _transpose(
    cotangent: Any,
    tangents: Any,
    operand: Any,
    *,
    window_dimensions: tuple[int, ...],
    **options: Any,
) -> Any:
    cotangent = _with_unsharded_windows(cotangent, window_dimensions)
    operand = _with_unsharded_windows(operand, window_dimensions)
    found, none = _installed[0](
        cotangent, tangents, operand, window_dimensions=window_dimensions, **options
    )
    return [_with_unsharded_windows(found, window_dimensions), none]


def _with_unsharded_windows(array: Any, window: tuple[int, ...]) -> Any:
    rows = rows_of_program()
    if (
        rows is None
        or not isinstance(array, jax.core.Tracer)
        # Inside of a `shard_map` of the user's.
        or jax.sharding.get_abstract_mesh().manual_axes
    ):
        return array
    axes = [None if length > 1 else jax.P.UNCONSTRAINED for length in window]
    sharding = jax.NamedSharding(rows.mesh, jax.P(*axes))
    return lax.with_sharding_constraint(array, sharding)
