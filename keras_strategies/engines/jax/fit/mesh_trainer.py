"""Training on a mesh of devices, over which batches are split."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax

from keras_strategies import keras_compat
from keras_strategies.devices import Device
from keras_strategies.engines.jax.batch_placement import MeshPlacer
from keras_strategies.engines.jax.fit import compiled_steps
from keras_strategies.engines.jax.fit.jax_trainer import JaxTrainer
from keras_strategies.engines.jax.fit.step_cost import step_cost
from keras_strategies.engines.jax.keras_distribution import StrategyDistribution
from keras_strategies.engines.jax.workers.jax_workers import JaxWorkers
from keras_strategies.runtime.base import StepCost

if TYPE_CHECKING:
    from keras_strategies.strategies.base import Strategy


class DistributionTrainer(JaxTrainer):
    """Batches split over a mesh, variables laid out by a Keras distribution.

    Args:
        strategy: the strategy.
        distribution: says where batches and variables go.
    """

    def __init__(self, strategy: Strategy, distribution: StrategyDistribution):
        mesh = distribution.device_mesh.backend_mesh
        placer = MeshPlacer(mesh)
        if strategy.workers is not None:
            placer = MeshPlacer(mesh, strategy.workers.check_batch)
        super().__init__(strategy, placer)
        self.whole = jax.NamedSharding(mesh, jax.P())
        self._distribution = distribution
        self._devices = distribution.own_layout(None).backend_layout.device_set

    def distribution(self) -> StrategyDistribution:
        return self._distribution

    def lay_out(self, variables: Sequence[Any]) -> None:
        for variable in variables:
            if keras_compat.layout_of(variable) is None:
                layout = self._distribution.own_layout(variable)
                keras_compat.set_layout(variable, layout)

    def is_in_place(self, variable: Any) -> bool:
        raw = keras_compat.raw_value(variable)
        if raw is None:
            return True
        # Without a layout it would not stay where it happens to be.
        layout = keras_compat.layout_of(variable)
        return layout is not None and raw.sharding.device_set == self._devices

    def adopt(self, variable: Any) -> None:
        layout = self._distribution.own_layout(variable)
        keras_compat.move_variable(variable, layout)


class MeshTrainer(DistributionTrainer):
    """A copy of the variables on each device of a mesh, batches split over it.

    Where there are workers, the mesh has the devices of all of them, and each worker
    gets the whole of what a step returns.
    """

    def __init__(
        self, strategy: Strategy, distribution: StrategyDistribution | None = None
    ):
        devices: Sequence[Device | jax.Device] = strategy.placement.replicas
        workers = strategy.workers
        if workers is not None and distribution is None:
            assert isinstance(workers, JaxWorkers)
            devices = workers.devices_of(strategy.placement.replicas)
        super().__init__(strategy, distribution or StrategyDistribution(devices))
        self.devices = list(self.whole.mesh.devices.flat)

    def step(self, model: Any, kind: str) -> compiled_steps.Step:
        step = self.plain_step(model, kind)
        outputs = None if self.strategy.workers is None else self.whole
        if compiled_steps.compiles(model):
            other = self.other_step(model, kind)
            return compiled_steps.compiled(
                model, kind, step, self.kept_layout, outputs, other
            )
        return step if outputs is None else compiled_steps.with_outputs(step, outputs)

    def step_cost(self, model: Any, batch: Any) -> StepCost:
        self.lay_out([*model.variables, *model.optimizer.variables])
        self.lay_out(model.metrics_variables)
        found = (self.plain_step(model, "train"), self.other_step(model, "train"))
        costs = [
            step_cost(model, step, batch, self.placer.layout)
            for step in found
            if step is not None
        ]
        # As `compiled_steps.compiled` chooses.
        return min(costs, key=lambda cost: sum(n for _, n in cost.sent.values()))

    def plain_step(self, model: Any, kind: str) -> compiled_steps.Step:
        return compiled_steps.keras_step(model, kind)

    def other_step(self, model: Any, kind: str) -> compiled_steps.Step | None:
        """A step that computes the same with other messages; None without one."""
        return None

    def kept_layout(self, group: Sequence[Any]) -> Any:
        return self.whole
