"""Training on a mesh of devices, over which batches are sharded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax

from keras_strategies.devices import Device
from keras_strategies.engines.jax.batch_placement import MeshPlacer
from keras_strategies.engines.jax.devices import jax_device
from keras_strategies.engines.jax.fit import compiled_steps
from keras_strategies.engines.jax.fit.compiled_steps import CompiledStep
from keras_strategies.engines.jax.fit.jax_trainer import JaxTrainer
from keras_strategies.engines.jax.fit.rollback import JaxRollback
from keras_strategies.engines.jax.fit.step_cost import step_cost
from keras_strategies.engines.jax.padded_rows import padded_sizes
from keras_strategies.engines.jax.strategy_distribution import StrategyDistribution
from keras_strategies.engines.jax.workers.jax_workers import JaxCommunicator
from keras_strategies.keras_compat.backends.keras_on_jax import (
    layout_of,
    move_variable,
    set_layout,
)
from keras_strategies.keras_compat.variables.values import raw_value
from keras_strategies.runtime.data_parallel.call_notes import note_program
from keras_strategies.runtime.drivers import ShardingDriver
from keras_strategies.runtime.placement import StepCost

if TYPE_CHECKING:
    from keras_strategies.runtime.engine import StrategyCore


class DistributionTrainer(JaxTrainer, ShardingDriver):
    """Batches sharded over a mesh, variables with the layouts of a distribution.

    Args:
        strategy: the strategy.
        distribution: the layouts of batches and variables.
    """

    split_rows = staticmethod(padded_sizes)

    def __init__(self, strategy: StrategyCore, distribution: StrategyDistribution):
        self._distribution = distribution
        workers = strategy.workers
        assert workers is None or isinstance(workers, JaxCommunicator)
        placer = MeshPlacer(self.mesh, workers)
        super().__init__(strategy, placer)
        self.mesh_placer = placer
        self._note_mesh()

    @property
    def mesh(self) -> jax.sharding.Mesh:
        """The devices of all replicas, those of other workers too."""
        mesh: jax.sharding.Mesh = self._distribution.device_mesh.backend_mesh
        return mesh

    def _note_mesh(self) -> None:
        layout = self._distribution.own_layout(None).backend_layout
        self._devices = layout.device_set
        self.replicated = jax.NamedSharding(self.mesh, jax.P())

    @property
    def distribution(self) -> StrategyDistribution:
        return self._distribution

    def keras_step(self, model: Any, kind: str) -> compiled_steps.Step:
        """The step of Keras or of the user."""
        if compiled_steps.compiles(model):
            note_program(model)
        rows = self.mesh_placer.row_sharding
        return compiled_steps.keras_step(model, kind, rows)

    def with_sharded_outputs(self, step: compiled_steps.Step) -> compiled_steps.Step:
        """A compiled step of `predict` whose outputs stay on their devices."""
        workers = self.strategy.workers
        rows = self.mesh_placer.row_sharding
        return compiled_steps.with_sharded_outputs(step, rows, workers is not None)

    def unsharded(self, variables: Sequence[Any]) -> list[Any]:
        return list(variables)

    def set_layouts(self, variables: Sequence[Any]) -> None:
        for variable in variables:
            if layout_of(variable) is None:
                layout = self._distribution.own_layout(variable)
                set_layout(variable, layout)

    def is_placed(self, variable: Any) -> bool:
        raw = raw_value(variable)
        if raw is None:
            return True
        # Without a layout, the next assignment would move the variable.
        layout = layout_of(variable)
        return layout is not None and raw.sharding.device_set == self._devices

    def place(self, variable: Any) -> None:
        layout = self._distribution.own_layout(variable)
        move_variable(variable, layout)


class MeshTrainer(DistributionTrainer):
    """A copy of the variables on each device of a mesh, batches sharded over it.

    In a cluster the mesh has the devices of all workers, and the outputs of a step are
    replicated.
    """

    def __init__(
        self, strategy: StrategyCore, distribution: StrategyDistribution | None = None
    ):
        devices: Sequence[Device | jax.Device] = strategy.placement.replicas
        workers = strategy.workers
        if workers is not None and distribution is None:
            assert isinstance(workers, JaxCommunicator)
            devices = workers.devices_of(strategy.placement.replicas)
        super().__init__(strategy, distribution or StrategyDistribution(devices))
        self._elastic_workers: JaxCommunicator | None = None
        if isinstance(workers, JaxCommunicator) and not workers.actions.is_fixed:
            self._elastic_workers = workers
            self.rollback = JaxRollback(self, workers)
            workers.when_replaced(self.replace_devices)

    def replace_devices(self) -> None:
        """Rebuilds the mesh from the devices of the current workers."""
        workers = self.placement.workers
        assert isinstance(workers, JaxCommunicator)
        devices = workers.devices_of(self.placement.replicas)
        self.replace_home(jax_device(self.placement.variables))
        self._distribution.replace_devices(devices)
        self._note_mesh()
        self.mesh_placer.use_mesh(self.mesh)

    def loop_function(self, model: Any, kind: str) -> Callable[..., Any]:
        if isinstance(self.rollback, JaxRollback):
            return self.rollback.function(model, kind)
        return super().loop_function(model, kind)

    def step(self, model: Any, kind: str) -> compiled_steps.Step:
        step = self.plain_step(model, kind)
        outputs = None if self.strategy.workers is None else self.replicated
        if not compiled_steps.compiles(model):
            if outputs is None:
                return step
            return compiled_steps.with_outputs(step, outputs)
        if kind == "predict":
            step = self.with_sharded_outputs(step)
            outputs = None  # The step constrains them.
        return CompiledStep(
            model,
            kind,
            step,
            self.state_sharding,
            outputs,
            self._elastic_workers,
        )

    def step_cost(self, model: Any, batch: Any) -> StepCost:
        self.set_layouts([*model.variables, *model.optimizer.variables])
        self.set_layouts(model.metrics_variables)
        step = CompiledStep(
            model, "train", self.plain_step(model, "train"), self.state_sharding
        )
        return step_cost(model, step, batch, self.mesh_placer.abstract)

    def plain_step(self, model: Any, kind: str) -> compiled_steps.Step:
        return self.keras_step(model, kind)

    def state_sharding(self, group: Sequence[Any]) -> Any:
        return self.replicated
