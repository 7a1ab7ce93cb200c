"""Where batches and variables go, for Keras: `keras.distribution` objects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import keras
import numpy as np
from keras.distribution import DeviceMesh, TensorLayout

from keras_strategies.devices import Device
from keras_strategies.engines.jax.devices import jax_device
from keras_strategies.layouts import BATCH_AXIS


def device_mesh(devices: Sequence[Device | jax.Device]) -> DeviceMesh:
    """A mesh with one axis, over which batches are split."""
    found = [jax_device(d) if isinstance(d, Device) else d for d in devices]
    # "cpu:1": JAX's own numbers, which Keras looks devices up by.
    names = [f"{d.platform}:{d.id}" for d in found]
    return DeviceMesh((len(names),), [BATCH_AXIS], np.array(names))


class StrategyDistribution(keras.distribution.DataParallel):
    """Data parallelism for batches of any size.

    A batch whose rows divide over the devices is split. JAX cannot split another
    one, such as the last batch of an epoch; every device gets and computes all of
    it. Numbers are the same either way, because a program describes the global
    batch.

    Args:
        devices: the device of each replica; JAX's own where some are of other
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

    def get_data_layout(self, data_shape: Sequence[int]) -> TensorLayout:
        axes: list[str | None] = [None] * len(data_shape)
        if splits(data_shape, self.device_mesh.devices.size):
            axes[0] = BATCH_AXIS
        return TensorLayout(axes, self.device_mesh)

    def get_variable_layout(self, variable: Any) -> TensorLayout:
        own = getattr(variable, "_layout", None)
        if own is not None:
            return own
        return self.own_layout(variable)

    def own_layout(self, variable: Any) -> TensorLayout:
        """Where this strategy keeps a variable, whatever layout it has."""
        # No axes for any rank, so that a variable's sharding equals that of a
        # compiled program's outputs, and no second program is compiled for it.
        return TensorLayout((), self._variable_mesh)

    def get_tensor_layout(self, path: str) -> None:
        return None


def splits(shape: Sequence[int], parts: int) -> bool:
    """Whether an array's rows divide over so many devices."""
    return len(shape) > 0 and shape[0] > 0 and shape[0] % parts == 0
