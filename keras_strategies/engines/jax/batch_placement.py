"""Batches on their way to the devices."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from keras_strategies.engines.jax.array_placement import is_spread, put
from keras_strategies.engines.jax.keras_distribution import splits
from keras_strategies.input.row_splits import check_batch
from keras_strategies.runtime.batch_prefetch import one_ahead


class BatchPlacer(abc.ABC):
    """Puts batches, structures of arrays, where a strategy computes."""

    @abc.abstractmethod
    def place(self, batch: Any) -> Any:
        """The batch on the devices; nothing happens to what is there already."""

    @abc.abstractmethod
    def layout(self, shape: Sequence[int]) -> jax.sharding.Sharding:
        """Where an array of a batch goes."""

    @abc.abstractmethod
    def batches(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The batches, on the devices when they are asked for."""

    def _begin(self, batch: Any) -> Callable[[], Any]:
        # JAX itself waits where the arrays are used.
        placed = self.place(batch)
        return lambda: placed


class MeshPlacer(BatchPlacer):
    """Splits each array over a mesh by its rows, or copies it to each device.

    Args:
        mesh: a mesh along whose first axis rows are split.
        compare: called with each batch before it is split, where other workers read
            the same.
    """

    def __init__(
        self,
        mesh: jax.sharding.Mesh,
        compare: Callable[[Any], None] = lambda batch: None,
    ):
        self._compare = compare
        axis = mesh.axis_names[0]
        self._size = mesh.shape[axis]
        self._split = jax.NamedSharding(mesh, jax.P(axis))
        self._whole = jax.NamedSharding(mesh, jax.P())
        self._ahead = mesh.devices.flat[0].platform != "cpu"

    def place(self, batch: Any) -> Any:
        check_batch(batch)
        if not any(map(is_spread, jax.tree.leaves(batch))):
            self._compare(batch)
        # None is no leaf to JAX; a sparse array's parts are leaves.
        leaves, structure = jax.tree.flatten(batch)
        leaves = [_as_array(leaf) for leaf in leaves]
        layouts = [self.layout(leaf.shape) for leaf in leaves]
        return jax.tree.unflatten(structure, put(leaves, layouts))

    def layout(self, shape: Sequence[int]) -> jax.sharding.Sharding:
        return self._split if splits(shape, self._size) else self._whole

    def batches(self, batches: Iterable[Any]) -> Iterator[Any]:
        if not self._ahead:
            return (self.place(batch) for batch in batches)
        return one_ahead(batches, self._begin)


class DevicePlacer(BatchPlacer):
    """Puts batches on one device.

    On a CPU, NumPy arrays stay what they are: a compiled program reads them where
    they lie.
    """

    def __init__(self, device: jax.Device):
        self._device = device
        self._is_cpu = device.platform == "cpu"

    def place(self, batch: Any) -> Any:
        if self._is_cpu and not _has_jax_arrays(batch):
            return batch
        return jax.tree.map(self._place_leaf, batch)

    def layout(self, shape: Sequence[int]) -> jax.sharding.Sharding:
        return jax.sharding.SingleDeviceSharding(self._device)

    def _place_leaf(self, leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            # To the scope's default device, which this one is.
            return jax.device_put(leaf)
        if leaf.devices() == {self._device}:
            return leaf
        return jax.device_put(leaf, self._device)

    def batches(self, batches: Iterable[Any]) -> Iterator[Any]:
        if self._is_cpu:
            return (self.place(batch) for batch in batches)
        return one_ahead(batches, self._begin)


def _as_array(leaf: Any) -> Any:
    return leaf if isinstance(leaf, (jax.Array, np.ndarray)) else np.asarray(leaf)


def _has_jax_arrays(batch: Any) -> bool:
    return any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(batch))
