"""Central storage: variables and updates on one device, computation on a mesh.

Arrays that the compute devices produce, metric states and statistics of batch
normalization, stay on the mesh between the steps of an epoch. At its end, Keras assigns
the variables, which moves them to the parameter device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax

from keras_strategies.engines.jax.fit import compiled_steps
from keras_strategies.engines.jax.fit.mesh_copies import MeshCopies
from keras_strategies.engines.jax.fit.mesh_trainer import DistributionTrainer
from keras_strategies.engines.jax.fit.partitioned_step import (
    PartitionedStep,
    marked_update,
)
from keras_strategies.engines.jax.recorded_results import call_recorded
from keras_strategies.engines.jax.strategy_distribution import StrategyDistribution
from keras_strategies.keras_compat.backends.keras_on_jax import record_jax_state

if TYPE_CHECKING:
    from keras_strategies.runtime.engine import StrategyCore


class CentralStorageTrainer(DistributionTrainer):
    """One copy of the variables on the parameter device, batches over a mesh."""

    def __init__(self, strategy: StrategyCore):
        placement = strategy.placement
        super().__init__(
            strategy, StrategyDistribution(placement.replicas, placement.variables)
        )
        self.at_home = jax.sharding.SingleDeviceSharding(self.home)
        self.state_sharding_of_loops = self.at_home
        self.mesh_copies = MeshCopies(self.replicated)

    def step(self, model: Any, kind: str) -> compiled_steps.Step:
        step = self.keras_step(model, kind)
        if not compiled_steps.compiles(model):
            return self._eager(step)
        if kind == "predict":
            step = self.with_sharded_outputs(step)
        return _CompiledStep(self, model, kind, step)

    def _eager(self, step: compiled_steps.Step) -> compiled_steps.Step:
        """A step that is not compiled; its update runs on the compute devices."""

        def eager_step(state: Any, batch: Any) -> tuple[Any, Any]:
            outputs, new = step(jax.device_put(state, self.replicated), batch)
            return outputs, jax.device_put(new, self.at_home)

        return eager_step


class _CompiledStep:
    """A `PartitionedStep` for each shape of a batch.

    It is traced with the groups of the state as one flat list.
    """

    def __init__(
        self,
        trainer: CentralStorageTrainer,
        model: Any,
        kind: str,
        step: compiled_steps.Step,
    ):
        self._trainer = trainer
        self._model = model
        self._kind = kind
        self._step = step
        self._programs: dict[Any, PartitionedStep] = {}

    def __call__(self, state: Any, batch: Any) -> tuple[Any, Any]:
        arrays, groups = jax.tree.flatten(state)
        program = self._program(arrays, groups, batch)
        read = [arrays[i] for i in program.reads]
        # A copy of an array that the step replaces is used once.
        unchanged = [i not in program.changes for i in program.reads]
        copies = self._trainer.mesh_copies.get(read, unchanged)
        values = program.compute(arrays, copies, batch)
        new = program.new_state(arrays, values)

        def record(updated: list[Any]) -> None:
            """Records the new state as soon as it exists."""
            for i, position in program.updates:
                new[i] = updated[position]
            state = jax.tree.unflatten(groups, new)
            record_jax_state(self._model, self._kind, state)

        updated: list[Any] = []
        if program.updates:
            arguments = program.update_arguments(values)
            updated = call_recorded(program.at_home, arguments, record)
        return program.outputs(values, updated), jax.tree.unflatten(groups, new)

    def _program(
        self, state: Sequence[jax.Array], groups: Any, batch: Any
    ) -> PartitionedStep:
        def flat_step(arrays: list[Any], batch: Any) -> tuple[Any, list[Any]]:
            outputs, new = self._step(jax.tree.unflatten(groups, arrays), batch)
            return outputs, jax.tree.leaves(new)

        arrays, structure = jax.tree.flatten(batch)
        # The groups change with `trainable`.
        key = (groups, structure, *(array.aval for array in arrays))
        program = self._programs.get(key)
        if program is None:
            trainer = self._trainer
            # A model that was not compiled has no optimizer.
            optimizer = getattr(self._model, "optimizer", None)
            is_updated = self._kind == "train" and optimizer is not None
            with marked_update(optimizer) if is_updated else contextlib.nullcontext():
                program = self._programs[key] = PartitionedStep(
                    flat_step, trainer.replicated, trainer.at_home, state, batch
                )
        return program
