"""Putting arrays on devices, some of which may be other processes'."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np


def put(arrays: Sequence[Any], shardings: Sequence[jax.sharding.Sharding]) -> list[Any]:
    """Puts arrays where shardings say, in one transfer.

    Over devices of several processes, each of them calls this with equal arrays and
    copies what its own devices get. `jax.device_put` would compare the arrays first,
    which is a message for each of them.

    Args:
        arrays: JAX's or NumPy's.
        shardings: one for each array.
    """
    found: list[Any] = [None] * len(arrays)
    local: list[int] = []
    pieces: list[Any] = []
    places: list[jax.Device] = []
    for i, (array, sharding) in enumerate(zip(arrays, shardings, strict=True)):
        if sharding.is_fully_addressable or is_spread(array):
            local.append(i)
            continue
        own = sharding.addressable_devices_indices_map(tuple(array.shape))
        whole = sharding.is_fully_replicated
        pieces += [array if whole else array[index] for index in own.values()]
        places += list(own)
    if local:
        moved = jax.device_put(
            [arrays[i] for i in local], [shardings[i] for i in local]
        )
        for i, array in zip(local, moved, strict=True):
            found[i] = array
    if pieces:
        # A copy of what JAX has: programs write over what is put here.
        moved = iter(jax.device_put(pieces, places, may_alias=False))
        for i, (array, sharding) in enumerate(zip(arrays, shardings, strict=True)):
            if found[i] is None:
                parts = [next(moved) for _ in sharding.addressable_devices]
                found[i] = jax.make_array_from_single_device_arrays(
                    tuple(array.shape), sharding, parts
                )
    return found


def put_all(arrays: Sequence[Any], sharding: jax.sharding.Sharding) -> list[Any]:
    """`put` with one sharding for all arrays."""
    known = [
        array if isinstance(array, (jax.Array, np.ndarray)) else np.asarray(array)
        for array in arrays
    ]
    return put(known, [sharding] * len(known))


def put_one(array: Any, sharding: jax.sharding.Sharding) -> Any:
    """`put` for one array."""
    return put_all([array], sharding)[0]


def is_spread(array: Any) -> bool:
    """Whether an array lies on devices of several processes."""
    return isinstance(array, jax.Array) and not array.is_fully_addressable


def local_value(array: Any) -> Any:
    """What a device of this process has of a spread array; others as they are.

    An array that is whole everywhere is meant, as batches and results are.
    """
    return array.addressable_data(0) if is_spread(array) else array
