"""Transfer of arrays to devices, also to those of several processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from keras_strategies.engines.jax.unread_rows import is_unread


def put(arrays: Sequence[Any], shardings: Sequence[jax.sharding.Sharding]) -> list[Any]:
    """Puts arrays on devices with shardings, in one transfer.

    With devices of several processes, each process calls this with equal arrays and
    copies the shards of its own devices. `jax.device_put` would first compare the
    arrays between processes, with one message for each array.

    Args:
        arrays: JAX or NumPy arrays, or those of `unread_rows`.
        shardings: a sharding for each array.
    """
    found: list[Any] = [None] * len(arrays)
    local: list[int] = []
    pieces: list[Any] = []
    devices: list[jax.Device] = []
    for i, (array, sharding) in enumerate(zip(arrays, shardings, strict=True)):
        is_on_host = isinstance(array, np.ndarray) or is_unread(array)
        if sharding.is_fully_addressable and is_on_host:
            found[i] = _from_host(array, sharding)
            continue
        if sharding.is_fully_addressable or spans_processes(array):
            local.append(i)
            continue
        own = sharding.addressable_devices_indices_map(tuple(array.shape))
        replicated = sharding.is_fully_replicated
        if replicated:
            read = np.asarray(array) if is_unread(array) else array
            pieces += [host_copy(read)] * len(own)
        else:
            pieces += [host_copy(array[index]) for index in own.values()]
        devices += list(own)
    if local:
        moved = jax.device_put(
            [arrays[i] for i in local], [shardings[i] for i in local]
        )
        for i, array in zip(local, moved, strict=True):
            found[i] = array
    if pieces:
        # Copies, also of JAX arrays: programs donate the result.
        moved = iter(jax.device_put(pieces, devices, may_alias=False))
        for i, (array, sharding) in enumerate(zip(arrays, shardings, strict=True)):
            if found[i] is None:
                parts = [next(moved) for _ in sharding.addressable_devices]
                found[i] = jax.make_array_from_single_device_arrays(
                    tuple(array.shape), sharding, parts
                )
    return found


def _from_host(array: Any, sharding: jax.sharding.Sharding) -> jax.Array:
    # In JAX 0.10 a third of the time of `jax.device_put`.
    return jax.make_array_from_callback(
        array.shape, sharding, lambda index: host_copy(array[index])
    )


def put_by_shards(
    array: np.ndarray, sharding: jax.sharding.Sharding, dtype: Any
) -> jax.Array:
    """Puts an array on the devices of this process, one shard after the other.

    Transfers are asynchronous and hold what they read; here there is one at a time.
    """
    own = sharding.addressable_devices_indices_map(array.shape)
    parts = []
    for device, index in own.items():
        part = _copied_once(array[index].astype(dtype, copy=False))
        parts.append(jax.block_until_ready(jax.device_put(part, device)))
    return jax.make_array_from_single_device_arrays(array.shape, sharding, parts)


def _copied_once(part: np.ndarray) -> np.ndarray:
    """What `jax.device_put` copies, faster than NumPy where an array is transposed.

    JAX 0.10 shares the memory of an aligned array in row-major order, also with
    `may_alias=False`.
    """
    return host_copy(part) if part.flags.c_contiguous else part  # type: ignore[no-any-return]


def host_copy(array: Any) -> Any:
    """A NumPy array of the same values in memory of its own.

    JAX reads the memory of a NumPy array after the transfer has returned: on a CPU an
    array may share it, and copies are asynchronous. A generator may overwrite the
    batch before.

    Args:
        array: NumPy array; others are returned unchanged.
    """
    is_on_host = isinstance(array, (np.ndarray, np.generic))
    return np.array(array) if is_on_host else array


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


def spans_processes(array: Any) -> bool:
    """Whether an array is on devices of several processes."""
    return isinstance(array, jax.Array) and not array.is_fully_addressable


def local_value(array: Any) -> Any:
    """A replicated array of several processes as an array of this one.

    Other arrays are returned unchanged.
    """
    return array.addressable_data(0) if spans_processes(array) else array
