"""Model parallelism: variables sharded over a mesh of devices."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import keras
import numpy as np
from keras.distribution import DeviceMesh, LayoutMap, TensorLayout

from keras_strategies.engines.jax.devices import jax_device
from keras_strategies.engines.jax.fit import compiled_steps
from keras_strategies.engines.jax.fit.mesh_trainer import MeshTrainer
from keras_strategies.engines.jax.padded_rows import is_padded
from keras_strategies.engines.jax.sharding.cross_worker_shards import (
    CrossWorkerShards,
    is_sharded_over_workers,
    place_variable,
)
from keras_strategies.engines.jax.strategy_distribution import splits
from keras_strategies.engines.jax.workers.jax_workers import JaxCommunicator
from keras_strategies.keras_compat.backends.keras_on_jax import (
    layout_of,
    sync_jax_state,
)
from keras_strategies.keras_compat.models.building import all_variables
from keras_strategies.keras_compat.variables.values import raw_value, stored_dtype
from keras_strategies.layouts import VariableMesh
from keras_strategies.runtime import context
from keras_strategies.runtime.colocation import layout_or_colocated
from keras_strategies.runtime.placement import check_layouts

if TYPE_CHECKING:
    from keras_strategies.runtime.engine import StrategyCore


class ModelParallelDistribution(keras.distribution.ModelParallel):
    """Variables sharded by the rules of a `VariableMesh`, batches of any size.

    Args:
        mesh: the grid of devices and the layout rules.
        devices: the devices of the grid, in a cluster those of all workers.
    """

    def __init__(self, mesh: VariableMesh, devices: Sequence[jax.Device]):
        # Keras identifies devices by the ids of JAX, such as "cpu:1".
        names = [f"{d.platform}:{d.id}" for d in devices]
        grid = np.array(names).reshape(mesh.shape)
        device_mesh = DeviceMesh(mesh.shape, list(mesh.axes), grid)
        layout_map = LayoutMap(device_mesh)
        super().__init__(layout_map=layout_map, auto_shard_dataset=False)
        self._mesh = mesh
        self._layouts: dict[Any, TensorLayout] = {}
        # Whether the current batch is sharded over the devices.
        self.splits_batch = True

    def get_data_layout(self, data_shape: Sequence[int]) -> TensorLayout:
        is_split = splits(data_shape, self._mesh.shape[0])
        return self._layout((self._mesh.batch_axis,) if is_split else ())

    def get_variable_layout(self, variable: Any) -> TensorLayout:
        return layout_or_colocated(variable, self.own_layout, self._layout(()))

    def own_layout(self, variable: Any) -> TensorLayout:
        """The layout of a variable by this strategy, regardless of its present one."""
        if variable is None:
            return self._layout(())
        itemsize = jax.numpy.dtype(variable.dtype).itemsize
        is_float = keras.backend.is_float_dtype(variable.dtype)
        axes = self._mesh.layout(variable.path, variable.shape, itemsize, is_float)
        return self._layout(axes)

    def get_tensor_layout(self, path: str) -> TensorLayout | None:
        if self._mesh.outputs is None:
            return None
        axes = self._mesh.outputs.find(path)
        if axes is None:
            return None
        if not self.splits_batch or context.current_replica() is not None:
            # Rows are replicated, or those of one replica.
            batch = self._mesh.batch_axis
            axes = tuple(None if axis == batch else axis for axis in axes)
        return self._layout(axes)

    def _layout(self, axes: tuple[str | None, ...]) -> TensorLayout:
        # One object for each layout: comparing a sharding to itself is fast.
        if axes not in self._layouts:
            self._layouts[axes] = TensorLayout(axes, self.device_mesh)
        return self._layouts[axes]


class ModelParallelTrainer(MeshTrainer):
    """Variables sharded over a mesh, batches sharded along its first axis."""

    def __init__(self, strategy: StrategyCore):
        mesh = strategy.placement.mesh
        assert mesh is not None
        self._grid = mesh
        workers = strategy.workers
        if workers is None:
            devices = [jax_device(device) for device in mesh.devices]
        else:
            assert isinstance(workers, JaxCommunicator)
            devices = workers.devices_of(mesh.own_devices)
        distribution = ModelParallelDistribution(mesh, devices)
        super().__init__(strategy, distribution)  # type: ignore[arg-type]
        #: Access to variables sharded over workers; None without a cluster.
        self.cross_worker_shards = (
            None if workers is None else CrossWorkerShards(workers)
        )

    def from_host(self, variable: Any, value: Any) -> Any:
        # Keras would put all of it on one device.
        dtype = jax.numpy.dtype(stored_dtype(variable))
        sharding = self.sharding_of(variable)
        return place_variable(value, sharding, dtype)

    def unsharded(self, variables: Sequence[Any]) -> list[Any]:
        complete: list[Any] = []
        sharded: list[Any] = []
        for variable in variables:
            is_sharded = is_sharded_over_workers(raw_value(variable))
            (sharded if is_sharded else complete).append(variable)
        if sharded:
            assert self.cross_worker_shards is not None
            self.cross_worker_shards.check(sharded)
        return complete

    @contextlib.contextmanager
    def reading(self, model: Any) -> Iterator[None]:
        if self.cross_worker_shards is None:
            yield
            return
        sync_jax_state(model)
        with self.cross_worker_shards.reading(all_variables(model)):
            yield

    @contextlib.contextmanager
    def method(self, model: Any, name: str) -> Iterator[None]:
        with super().method(model, name):
            yield
        # Models built from their first batch in `predict`.
        if name != "compile":
            check_layouts(self.placement, model)

    def step_function(self, model: Any, kind: str, make: Callable[[], Any]) -> None:
        check_layouts(self.placement, model)
        super().step_function(model, kind, make)

    def state_sharding(self, group: Sequence[jax.Array]) -> Any:
        return [array.sharding for array in group]

    def plain_step(self, model: Any, kind: str) -> compiled_steps.Step:
        step = super().plain_step(model, kind)
        if kind != "train":
            return self._traced(step)

        def constrained_step(state: Any, batch: Any) -> tuple[Any, Any]:
            # The gradient of a replicated variable is gathered once. Otherwise XLA may
            # keep it sharded, and gather the updated variable and each slot instead.
            own = [self.sharding_of(v) for v in model.trainable_variables]
            with _with_placed_gradients(model, own):
                return step(state, batch)

        return self._traced(constrained_step)

    def _traced(self, step: compiled_steps.Step) -> compiled_steps.Step:
        distribution = self.distribution
        count = self._grid.shape[0]

        def sharded_step(state: Any, batch: Any) -> tuple[Any, Any]:
            # Rows that do not divide are sharded in programs only.
            leaves = jax.tree.leaves(batch, is_leaf=is_padded)
            distribution.splits_batch = all(
                isinstance(leaf.array, jax.core.Tracer)
                if is_padded(leaf)
                else splits(leaf.shape, count)
                for leaf in leaves
            )
            return step(state, batch)

        return sharded_step

    def sharding_of(self, variable: Any) -> jax.NamedSharding:
        """The sharding of a variable's value."""
        layout = layout_of(variable)
        if layout is None:
            return self.replicated
        sharding: jax.NamedSharding = layout.backend_layout
        return sharding


@contextlib.contextmanager
def _with_placed_gradients(
    model: Any, shardings: Sequence[jax.NamedSharding]
) -> Iterator[None]:
    """Computes the gradients of trainable variables with these shardings."""
    original = model.stateless_call

    def stateless_call(variables: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        return original(list(map(_placed, shardings, variables)), *args, **kwargs)

    # Bypasses Keras's tracking of attributes.
    object.__setattr__(model, "stateless_call", stateless_call)
    try:
        yield
    finally:
        object.__delattr__(model, "stateless_call")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _placed(sharding: jax.NamedSharding, value: Any) -> Any:
    """A variable with a sharding, which its gradient has as well."""
    return jax.lax.with_sharding_constraint(value, sharding)


def _placed_forward(sharding: jax.NamedSharding, value: Any) -> tuple[Any, None]:
    return _placed(sharding, value), None


def _placed_backward(sharding: jax.NamedSharding, _: None, gradient: Any) -> tuple[Any]:
    return (jax.lax.with_sharding_constraint(gradient, sharding),)


_placed.defvjp(_placed_forward, _placed_backward)
