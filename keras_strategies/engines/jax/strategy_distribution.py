"""Layouts of batches and variables, as a `keras.distribution.Distribution`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import keras
import numpy as np
from keras.distribution import DeviceMesh, TensorLayout

from keras_strategies.devices import Device
from keras_strategies.engines.jax.devices import jax_device
from keras_strategies.keras_compat.backends.keras_on_jax import layout_of, replace_mesh
from keras_strategies.layouts import BATCH_AXIS


def device_mesh(devices: Sequence[Device | jax.Device]) -> DeviceMesh:
    """A mesh with one axis, over which batches are sharded."""
    names = _names(devices)
    return DeviceMesh(names.shape, [BATCH_AXIS], names)


def _names(devices: Sequence[Device | jax.Device]) -> Any:
    """The names by which Keras identifies devices: the ids of JAX, such as "cpu:1"."""
    found = [jax_device(d) if isinstance(d, Device) else d for d in devices]
    return np.array([f"{d.platform}:{d.id}" for d in found])


class StrategyDistribution(keras.distribution.DataParallel):
    """Data parallelism for batches of any size.

    A batch is sharded if the number of devices divides its rows. JAX cannot shard
    others, such as the last batch of an epoch: they are replicated, and every device
    computes all rows. Results are equal, because a program is written for the global
    batch.

    Args:
        devices: the device of each replica; JAX devices where some are of other
            processes.
        variables: the device of all variables; None for a copy on each replica.
    """

    def __init__(
        self,
        devices: Sequence[Device | jax.Device],
        variables: Device | None = None,
    ):
        super().__init__(device_mesh=device_mesh(devices), auto_shard_dataset=False)
        self._variable_mesh = self.device_mesh
        if variables is not None:
            self._variable_mesh = device_mesh([variables])
        # No axes at any rank: equal to the sharding of a program's outputs. With any
        # other sharding of its inputs, it would be compiled a second time.
        self._replicated = TensorLayout((), self._variable_mesh)

    def replace_devices(self, devices: Sequence[jax.Device]) -> None:
        """Puts the mesh, and the layouts that variables have, on other devices."""
        replace_mesh(self.device_mesh, [self._replicated], _names(devices))

    def get_data_layout(self, data_shape: Sequence[int]) -> TensorLayout:
        axes: list[str | None] = [None] * len(data_shape)
        if splits(data_shape, self.device_mesh.devices.size):
            axes[0] = BATCH_AXIS
        return TensorLayout(axes, self.device_mesh)

    def get_variable_layout(self, variable: Any) -> TensorLayout:
        own = layout_of(variable)
        if own is not None:
            return own
        return self.own_layout(variable)

    def own_layout(self, variable: Any) -> TensorLayout:
        """The layout of a variable by this strategy, regardless of its present one."""
        return self._replicated

    def get_tensor_layout(self, path: str) -> None:
        return None


def splits(shape: Sequence[int], count: int) -> bool:
    """Whether an array's rows divide evenly by the number of devices."""
    return len(shape) > 0 and shape[0] > 0 and shape[0] % count == 0
