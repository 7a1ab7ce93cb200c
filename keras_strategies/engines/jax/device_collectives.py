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
    """The reduction of the tensors, on each of their devices."""
    devices = _distinct_devices(tensors)
    if devices is None:
        return _like(reduced(op, _stacked_anywhere(tensors)), tensors)
    found = _reduction(op, devices)(_stacked(tensors, devices))
    shards = {shard.device: shard.data for shard in found.addressable_shards}
    return [shards[device] for device in devices]


def reduced(op: ReduceOp, stacked: Any) -> Any:
    """The reduction of an array along its first axis."""
    return _REDUCTIONS[op](stacked, axis=0)


def _distinct_devices(tensors: Sequence[Any]) -> tuple[jax.Device, ...] | None:
    """The tensors' devices; None where two share one, and in a trace."""
    if len(tensors) == 1 or _is_traced(tensors):
        return None
    if any(len(tensor.devices()) > 1 for tensor in tensors):
        return None
    devices = tuple(next(iter(tensor.devices())) for tensor in tensors)
    return devices if len(set(devices)) == len(devices) else None


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


def _stacked(tensors: Sequence[Any], devices: tuple[jax.Device, ...]) -> jax.Array:
    """One array of shape `(replicas, ...)`; its shards are the tensors."""
    rows = [jnp.expand_dims(tensor, 0) for tensor in tensors]
    return jax.make_array_from_single_device_arrays(
        (len(rows), *tensors[0].shape),
        jax.NamedSharding(_mesh(devices), jax.P("replica")),
        rows,
    )


def _mesh(devices: tuple[jax.Device, ...]) -> jax.sharding.Mesh:
    return jax.sharding.Mesh(np.array(devices), ("replica",))


@functools.cache
def _reduction(op: ReduceOp, devices: tuple[jax.Device, ...]) -> Callable[..., Any]:
    """A program over the devices that is one XLA collective."""
    replicated = jax.NamedSharding(_mesh(devices), jax.P())
    return jax.jit(lambda rows: reduced(op, rows), out_shardings=replicated)
