"""Transfer of the parts of a batch to the devices of replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from keras_strategies.engines.jax.array_placement import local_value, put
from keras_strategies.values import regroup


class BatchTransfer:
    """See `Engine.transfers`.

    Args:
        devices: the device of each part.
    """

    def __init__(self, devices: Sequence[jax.Device]):
        self._shardings = list(map(jax.sharding.SingleDeviceSharding, devices))

    def __call__(self, parts: Sequence[Any]) -> Callable[[], Any]:
        moved = []
        for part, sharding in zip(parts, self._shardings, strict=True):
            leaves, structure = jax.tree.flatten(part)
            placed = put([*map(local_value, leaves)], [sharding] * len(leaves))
            moved.append(jax.tree.unflatten(structure, placed))
        batch = regroup(moved)
        return lambda: batch
