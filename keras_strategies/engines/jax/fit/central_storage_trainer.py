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
            return _EagerStep(self, model, kind, step)
        if kind == "predict":
            step = self.with_sharded_outputs(step)
        return _CompiledStep(self, model, kind, step)


class _CentralStep:
    """Base of steps that are traced with the groups of their state as one flat list."""

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
        self._lengths: list[int] = []

    def __call__(self, state: Any, batch: Any) -> tuple[Any, Any]:
        self._lengths = [len(group) for group in state]
        outputs, new = self._run([array for group in state for array in group], batch)
        return outputs, self._groups(new)

    def _run(self, state: list[Any], batch: Any) -> tuple[Any, list[Any]]:
        raise NotImplementedError

    def _groups(self, flat: Sequence[Any]) -> tuple[list[Any], ...]:
        values = iter(flat)
        return tuple([next(values) for _ in range(n)] for n in self._lengths)

    def _flat_step(self, flat: list[Any], batch: Any) -> tuple[Any, list[Any]]:
        outputs, new = self._step(self._groups(flat), batch)
        return outputs, [array for group in new for array in group]


class _CompiledStep(_CentralStep):
    """A `PartitionedStep` for each shape of a batch."""

    def __init__(
        self,
        trainer: CentralStorageTrainer,
        model: Any,
        kind: str,
        step: compiled_steps.Step,
    ):
        super().__init__(trainer, model, kind, step)
        self._programs: dict[Any, PartitionedStep] = {}

    def _run(self, state: list[Any], batch: Any) -> tuple[Any, list[Any]]:
        program = self._program(state, batch)
        read = [state[i] for i in program.reads]
        # A copy of an array that the step replaces is used once.
        unchanged = [i not in program.changes for i in program.reads]
        copies = self._trainer.mesh_copies.get(read, unchanged)
        values = program.compute(state, copies, batch)
        new = program.new_state(state, values)
        updated = self._update(program, values, new) if program.updates else []
        return program.outputs(values, updated), new

    def _update(
        self, program: PartitionedStep, values: dict[Any, Any], new: list[Any]
    ) -> list[Any]:
        """Runs the update, and records the new state as soon as it exists."""

        def record(updated: list[Any]) -> None:
            for i, position in program.updates:
                new[i] = updated[position]
            record_jax_state(self._model, self._kind, self._groups(new))

        found: list[Any] = call_recorded(
            program.at_home, program.update_arguments(values), record
        )
        return found

    def _program(self, state: Sequence[jax.Array], batch: Any) -> PartitionedStep:
        arrays, structure = jax.tree.flatten(batch)
        # The groups change with `trainable`.
        key = (*self._lengths, structure, *(array.aval for array in arrays))
        program = self._programs.get(key)
        if program is None:
            trainer = self._trainer
            # A model that was not compiled has no optimizer.
            optimizer = getattr(self._model, "optimizer", None)
            is_updated = self._kind == "train" and optimizer is not None
            with marked_update(optimizer) if is_updated else contextlib.nullcontext():
                program = self._programs[key] = PartitionedStep(
                    self._flat_step, trainer.replicated, trainer.at_home, state, batch
                )
        return program


class _EagerStep(_CentralStep):
    """A step that is not compiled; its update runs on the compute devices."""

    def _run(self, state: list[Any], batch: Any) -> tuple[Any, list[Any]]:
        copies = jax.device_put(state, self._trainer.replicated)
        outputs, new = self._flat_step(copies, batch)
        return outputs, jax.device_put(new, self._trainer.at_home)
