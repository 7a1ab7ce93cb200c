"""Transfer of the parts of a batch to the devices of replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from keras_strategies.engines.jax.array_placement import host_copy, local_value, put
from keras_strategies.engines.jax.function.sharded_values import ShardedValues
from keras_strategies.layouts import BATCH_AXIS
from keras_strategies.values import regroup


class BatchTransfer:
    """See `Engine.transfers`.

    Parts of one shape become shards of one array, which `ks.function` reads without
    joining them.

    Args:
        devices: the device of each part.
    """

    def __init__(self, devices: Sequence[jax.Device]):
        self._shardings = list(map(jax.sharding.SingleDeviceSharding, devices))
        self._split: jax.NamedSharding | None = None
        if len(set(devices)) == len(devices) > 1:
            mesh = jax.sharding.Mesh(np.array(devices), (BATCH_AXIS,))
            self._split = jax.NamedSharding(mesh, jax.P(BATCH_AXIS))

    def __call__(self, parts: Sequence[Any]) -> Callable[[], Any]:
        leaves, structures = zip(*map(jax.tree.flatten, parts), strict=True)
        if self._split is not None and _are_alike(leaves):
            joined = [
                _sharded(column, self._split) for column in zip(*leaves, strict=True)
            ]
            batch = jax.tree.unflatten(structures[0], joined)
        else:
            moved = [
                put([*map(local_value, own)], [sharding] * len(own))
                for own, sharding in zip(leaves, self._shardings, strict=True)
            ]
            batch = regroup(list(map(jax.tree.unflatten, structures, moved)))
        return lambda: batch


def _are_alike(leaves: Sequence[Sequence[Any]]) -> bool:
    """Whether the parts of each array are NumPy arrays of one shape, with rows."""
    return all(
        type(part) is np.ndarray
        and part.size
        and part.shape
        and part.shape == column[0].shape
        for column in zip(*leaves, strict=True)
        for part in column
    )


def _sharded(parts: Sequence[Any], split: jax.NamedSharding) -> ShardedValues:
    rows, *rest = parts[0].shape

    def part(index: Any) -> Any:
        return host_copy(parts[(index[0].start or 0) // rows])

    array = jax.make_array_from_callback((len(parts) * rows, *rest), split, part)
    return ShardedValues(array, parts[0].shape)
