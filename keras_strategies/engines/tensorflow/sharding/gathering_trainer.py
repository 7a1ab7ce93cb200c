"""`Model.fit`, `evaluate` and `predict` with variables in shards."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf
from keras.distribution import DeviceMesh, LayoutMap, TensorLayout

from keras_strategies.engines.tensorflow.compat.variables import (
    is_resource_variable,
    new_variable,
)
from keras_strategies.engines.tensorflow.devices import tf_device
from keras_strategies.engines.tensorflow.replicas.replica_run import (
    creating_variables,
)
from keras_strategies.engines.tensorflow.sharding.shard_grid import ShardGrid
from keras_strategies.engines.tensorflow.sharding.shard_updates import (
    updating_by_shards,
)
from keras_strategies.engines.tensorflow.sharding.variables_in_shards import (
    VariableInShards,
    tensor_of,
)
from keras_strategies.engines.tensorflow.sharding.variables_over_workers import (
    VariableOverWorkers,
)
from keras_strategies.engines.tensorflow.trainer import TensorFlowTrainer
from keras_strategies.engines.tensorflow.workers.worker_collectives import workers_of
from keras_strategies.keras_compat.backends.keras_on_jax import set_layout
from keras_strategies.keras_compat.models.building import all_variables
from keras_strategies.keras_compat.optimizers.optimizer_parts import optimizers_in
from keras_strategies.keras_compat.variables.loaded_variables import (
    give_first_value,
    is_waiting,
)
from keras_strategies.keras_compat.variables.values import (
    declared_shape,
    raw_value,
    set_raw_value,
    stored_dtype,
)
from keras_strategies.layouts import VariableMesh
from keras_strategies.runtime.colocation import layout_or_colocated
from keras_strategies.runtime.drivers import ShardingDriver
from keras_strategies.runtime.placement import (
    StepCost,
    VariableCopy,
    axes_of,
    check_layouts,
    itemsize,
    nbytes_of,
)
from keras_strategies.runtime.state.chief_reads import ChiefReads
from keras_strategies.runtime.state.cross_worker_values import check_equal_values
from keras_strategies.runtime.state.run_state import is_local

if TYPE_CHECKING:
    from keras_strategies.runtime.engine import StrategyCore


class GatheringTrainer(TensorFlowTrainer, ShardingDriver):
    """Variables in shards on a mesh; each device gathers them for its rows."""

    def __init__(self, strategy: StrategyCore):
        super().__init__(strategy)
        mesh = self.placement.mesh
        assert mesh is not None
        self._mesh = mesh
        self._distribution = _distribution(mesh)

    # Variables.

    def initialize(
        self, variable: Any, original: Callable[[Any], None], value: Any
    ) -> None:
        """Creates the `tf.Variable` of a Keras variable in shards, or a replicated one.

        A `tf.Variable` passed by the user is not sharded: programs may assign it.
        """
        shape = getattr(value, "shape", None) or declared_shape(variable)
        if isinstance(value, tf.Variable) or not self._has_shards(variable, shape):
            super().initialize(variable, original, value)
            return
        array = value if isinstance(value, np.ndarray) else None
        with creating_variables(tf_device(self.placement.variables)):
            original(value if array is None else _without_value(variable))
        self._shard(variable, array)

    def _has_shards(self, variable: Any, shape: Any) -> bool:
        """Whether a variable that is made now, and gets its layout, is sharded."""
        if is_local(variable):
            return False
        set_layout(variable, self._layout_of(variable, tuple(shape)))
        return bool(axes_of(self._mesh, variable))

    def _shard(self, variable: Any, array: np.ndarray | None = None) -> None:
        """Replaces the value of a variable with a layout by shards.

        Args:
            variable: with a value, or with a `tf.Variable` without one.
            array: the value then.
        """
        raw = raw_value(variable)
        grid = ShardGrid.of(self._mesh, axes_of(self._mesh, variable), len(raw.shape))
        first, _ = self._mesh.own or (0, 0)
        devices = {
            first + i: tf_device(device)
            for i, device in enumerate(self._mesh.own_devices)
        }
        own = grid.within(first, len(devices))
        sharded: VariableInShards
        if own.is_complete:
            sharded = VariableInShards(raw, own, devices, creating_variables, array)
        else:
            workers = workers_of(self.placement)
            assert workers is not None
            sharded = VariableOverWorkers(
                *(raw, grid, devices, creating_variables, array),
                path=variable.path,
                workers=workers,
            )
        set_raw_value(variable, sharded)

    def adopt(self, variables: Iterable[Any]) -> None:
        # Keras gives slots the layout of their variable, outside of the scope, too.
        for variable in variables:
            raw = raw_value(variable)
            if is_resource_variable(raw) and any(axes_of(self._mesh, variable)):
                self._shard(variable)

    def _layout_of(self, variable: Any, shape: tuple[int, ...]) -> TensorLayout:
        def own(variable: Any) -> TensorLayout:
            is_float = keras.backend.is_float_dtype(variable.dtype)
            size = itemsize(variable.dtype)
            return self._layout(
                self._mesh.layout(variable.path, shape, size, is_float), len(shape)
            )

        return layout_or_colocated(variable, own, self._layout((), len(shape)))

    def _layout(self, axes: Sequence[str | None], rank: int) -> TensorLayout:
        full = [*axes, *[None] * (rank - len(axes))]
        return TensorLayout(full, self._distribution.device_mesh)

    def copies(self, variable: Any) -> list[VariableCopy]:
        raw = raw_value(variable)
        if not isinstance(raw, VariableInShards):
            return super().copies(variable)
        devices = {tf_device(device): str(device) for device in self._mesh.own_devices}
        return [
            VariableCopy(
                devices[name],
                shard.dtype.size * shard.shape.num_elements(),
                "shard",
                shard,
            )
            for name, shard in raw.by_device.items()
        ]

    # Layouts.

    @property
    def distribution(self) -> Any:
        return self._distribution

    def from_host(self, variable: Any, value: Any) -> Any:
        raw, dtype = raw_value(variable), tf.as_dtype(stored_dtype(variable))
        is_same = value.dtype == dtype.as_numpy_dtype
        if not tf.executing_eagerly() or not (
            is_same or (dtype.is_floating and _is_float(value))
        ):
            # Keras converts it, or refuses to.
            return value
        if isinstance(raw, VariableInShards):
            raw.assign_array(value)
            return None
        if is_waiting(variable) and self._has_shards(variable, value.shape):
            give_first_value(variable, value)
            return None
        return tensor_of(value) if is_same else value

    def set_layouts(self, variables: Sequence[Any]) -> None:
        for variable in variables:
            layout = self._layout_of(variable, tuple(variable.shape))
            set_layout(variable, layout)

    def step_cost(self, model: Any, batch: Any) -> StepCost:
        devices = len(self._mesh.devices)
        gathered, reduced, mirrored = [], [], []
        for variable in model.variables:
            axes, nbytes = axes_of(self._mesh, variable), nbytes_of(variable)
            if not axes:
                mirrored += [nbytes] if variable.trainable else []
                continue
            grid = ShardGrid.of(self._mesh, axes, len(variable.shape))
            # A device reads a shard from one of those that have it.
            gathered.append((devices - len(grid.holders[0])) * nbytes // devices)
            if variable.trainable:
                reduced.append((grid.count - 1) * nbytes // grid.count)
        sent = {
            "all-gather of weights": (len(gathered), sum(gathered)),
            "reduce-scatter of gradients": (len(reduced), sum(reduced)),
        }
        others = devices - 1
        if mirrored and others:
            # The first device adds them, and sends what it has updated.
            own = 2 * others * sum(mirrored) // devices
            sent["gradients and updates of replicated weights"] = len(mirrored), own
        cost = StepCost(
            None,
            {name: cost for name, cost in sent.items() if cost[0]},
            "sent bytes are estimated from the sizes of the variables",
        )
        return self._with_activation(cost, model, batch)

    # Workers.

    def unsharded(self, variables: Sequence[Any]) -> list[Any]:
        complete: list[Any] = []
        sharded: list[Any] = []
        for variable in variables:
            is_over_workers = isinstance(raw_value(variable), VariableOverWorkers)
            (sharded if is_over_workers else complete).append(variable)
        if sharded:
            assert self.placement.workers is not None
            raws = [raw_value(variable) for variable in sharded]
            assigned = [raw.assigned_value for raw in raws]
            check_equal_values(self.placement.workers.group, sharded, assigned)
            for raw in raws:
                raw.assigned_value = None
        return complete

    @contextlib.contextmanager
    def reading(self, model: Any) -> Iterator[None]:
        workers = self.placement.workers
        values = map(raw_value, all_variables(model))
        found = [raw for raw in values if isinstance(raw, VariableOverWorkers)]
        if workers is None or not found:
            yield
            return
        reads = ChiefReads(workers.group, found, lambda raw: raw.gather(raw.home))
        try:
            if workers.group.is_chief:
                for raw in found:
                    raw.read_by_chief = functools.partial(reads.read, raw)
            with reads.open():
                yield
        finally:
            for raw in found:
                raw.read_by_chief = None

    # Models.

    @contextlib.contextmanager
    def method(self, model: Any, name: str) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for optimizer in optimizers_in(model):
                stack.enter_context(updating_by_shards(optimizer))
            stack.enter_context(super().method(model, name))
            yield
        # Models that are built from their first batch in `predict`.
        if name != "compile":
            check_layouts(self.placement, model)

    def step_function(self, model: Any, kind: str, make: Callable[[], Any]) -> None:
        check_layouts(self.placement, model)
        optimizer = getattr(model, "optimizer", None)
        if optimizer is not None:
            self.adopt(optimizer.variables)
        super().step_function(model, kind, make)


def _without_value(variable: Any) -> Any:
    """The `tf.Variable` of a variable whose value is in shards."""
    spec = tf.TensorSpec(declared_shape(variable), stored_dtype(variable))
    return new_variable(spec, bool(variable.trainable), variable.name)


def _is_float(array: Any) -> bool:
    return bool(keras.backend.is_float_dtype(array.dtype.name))


def _distribution(mesh: VariableMesh) -> keras.distribution.ModelParallel:
    """The mesh for users and for Keras's layouts; Keras places nothing by it here."""
    names = [str(device) for device in mesh.devices]
    grid = DeviceMesh(mesh.shape, list(mesh.axes), names)
    layout_map = LayoutMap(grid)
    return keras.distribution.ModelParallel(
        layout_map=layout_map,
        batch_dim_name=mesh.batch_axis,
        auto_shard_dataset=False,
    )
