"""Collectives on lists of arrays, one for each replica."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from keras_strategies.types import ReduceOp

_REDUCTIONS: dict[ReduceOp, Callable[..., Any]] = {
    ReduceOp.SUM: jnp.sum,
    ReduceOp.MEAN: jnp.mean,
    ReduceOp.MIN: jnp.min,
    ReduceOp.MAX: jnp.max,
}


def all_reduce(op: ReduceOp, tensors: Sequence[Any]) -> list[Any]:
    """The reduction of the tensors, on the device of each of them."""
    places = _places(tensors)
    if places is None:
        reduced = _REDUCTIONS[op](_stacked_anywhere(tensors), axis=0)
        return _like(reduced, tensors)
    reduced = _reduction(op, places)(_stacked(tensors, places))
    shards = {shard.device: shard.data for shard in reduced.addressable_shards}
    return [shards[device] for device in places]


def all_gather(tensors: Sequence[Any], axis: int) -> list[Any]:
    """The concatenation of the tensors, on the device of each of them."""
    first = tensors[0]
    if _is_traced(tensors):
        return [jnp.concatenate(tensors, axis)] * len(tensors)
    moved = [jax.device_put(tensor, first.sharding) for tensor in tensors]
    return _like(jnp.concatenate(moved, axis), tensors)


def _places(tensors: Sequence[Any]) -> tuple[jax.Device, ...] | None:
    """The tensors' devices, None where two share one or a program is traced."""
    if len(tensors) == 1 or _is_traced(tensors):
        return None
    if any(len(tensor.devices()) > 1 for tensor in tensors):
        return None
    places = tuple(next(iter(tensor.devices())) for tensor in tensors)
    return places if len(set(places)) == len(places) else None


def _is_traced(tensors: Sequence[Any]) -> bool:
    return any(isinstance(tensor, jax.core.Tracer) for tensor in tensors)


def _stacked_anywhere(tensors: Sequence[Any]) -> Any:
    if _is_traced(tensors):
        return jnp.stack(tensors)
    return jnp.stack([jax.device_put(t, tensors[0].sharding) for t in tensors])


def _like(value: Any, tensors: Sequence[Any]) -> list[Any]:
    if _is_traced(tensors):
        return [value] * len(tensors)
    return [jax.device_put(value, tensor.sharding) for tensor in tensors]


def _stacked(tensors: Sequence[Any], places: tuple[jax.Device, ...]) -> jax.Array:
    """One array of shape `(replicas, ...)` whose rows lie where they were."""
    rows = [jnp.expand_dims(tensor, 0) for tensor in tensors]
    return jax.make_array_from_single_device_arrays(
        (len(rows), *tensors[0].shape),
        jax.NamedSharding(_mesh(places), jax.P("replica")),
        rows,
    )


def _mesh(places: tuple[jax.Device, ...]) -> jax.sharding.Mesh:
    return jax.sharding.Mesh(np.array(places), ("replica",))


@functools.cache
def _reduction(op: ReduceOp, places: tuple[jax.Device, ...]) -> Callable[..., Any]:
    """A program over the devices, in which XLA's collective does the reduction."""
    reduce = _REDUCTIONS[op]
    whole = jax.NamedSharding(_mesh(places), jax.P())
    return jax.jit(lambda rows: reduce(rows, axis=0), out_shardings=whole)
