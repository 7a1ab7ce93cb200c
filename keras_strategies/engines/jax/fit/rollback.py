"""Rollback of steps on JAX: repeatable, because their state is not donated."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from keras_strategies.engines.jax.array_placement import local_value
from keras_strategies.engines.jax.fit import compiled_steps
from keras_strategies.engines.jax.padded_rows import outputs_on_host
from keras_strategies.engines.jax.workers.jax_workers import JaxCommunicator
from keras_strategies.keras_compat.backends.keras_on_jax import (
    hold_jax_state,
    record_jax_state,
    recorded_jax_state,
    sync_jax_state,
)
from keras_strategies.keras_compat.variables.values import raw_value, set_raw_value
from keras_strategies.runtime.drivers import RollbackDriver
from keras_strategies.runtime.worker_batch import WorkerBatch

if TYPE_CHECKING:
    from keras_strategies.cluster.group import WorkerGroup
    from keras_strategies.engines.jax.fit.jax_trainer import JaxTrainer


class JaxRollback(RollbackDriver):
    """Steps that complete on all workers, or fail without effect.

    A step does not donate the arrays of its state, so saving them needs no copy.

    Args:
        trainer: the trainer of the strategy.
        workers: the communicator between workers.
    """

    def __init__(self, trainer: JaxTrainer, workers: JaxCommunicator):
        self._trainer = trainer
        self._workers = workers

    def function(self, model: Any, kind: str) -> Callable[..., Any]:
        """The function that Keras calls for each item of its loop."""
        several = model.steps_per_execution
        actions = self._workers.actions
        program = _Program(self._trainer, self._workers, model, kind)

        def function(state: Any, batches: Iterator[Any]) -> tuple[Any, Any]:
            hold_jax_state(model, kind, state)
            read = list(itertools.islice(self._workers.steps.timed(batches), several))
            if not read:
                raise StopIteration
            outputs = actions.step(model, kind, lambda: program(read))
            return outputs, recorded_jax_state(model, kind)

        return function

    def save_state(self, model: Any, kind: str) -> Callable[[], bool]:
        state = recorded_jax_state(model, kind)

        def restore() -> bool:
            hold_jax_state(model, kind, state)
            # Assigned to the variables: their values move to the next devices.
            sync_jax_state(model)
            return True

        return restore

    def save_variables(self, variables: Sequence[Any]) -> Callable[[], bool]:
        saved = [(variable, raw_value(variable)) for variable in variables]

        def restore() -> bool:
            for variable, value in saved:
                if value is not None:
                    set_raw_value(variable, value)
            return True

        return restore

    def reformed(self, model: Any, has_new: bool) -> None:
        # Nothing to drop: `_Program` compiles again for each group.
        pass


class _Program:
    """The step of a method, compiled for the current group of workers."""

    def __init__(
        self, trainer: JaxTrainer, workers: JaxCommunicator, model: Any, kind: str
    ):
        self._trainer, self._workers = trainer, workers
        self._model, self._kind = model, kind
        self._group: WorkerGroup | None = None
        self._step: compiled_steps.Step | None = None

    def __call__(self, batches: list[Any]) -> Any:
        """Takes a step on each batch; returns logs of the last, or all outputs."""
        self._workers.steps.begin_steps(len(batches))
        step = self._current_step()
        state = recorded_jax_state(self._model, self._kind)
        outputs = []
        with self._workers.exchange():
            for batch in batches:
                if isinstance(batch, WorkerBatch):
                    batch = batch.of(self._workers.replica_counts)
                placed = self._trainer.placer.place(batch)
                if not _is_split(placed):
                    # Without a collective, workers would be several steps apart, and
                    # those that are behind could not take the state of another one.
                    self._workers.group.barrier("a step")
                self._workers.steps.await_checks()
                found, state = step(state, placed)
                if not compiled_steps.compiles(self._model):
                    # JAX executes operations asynchronously, and errors appear where
                    # results are read.
                    wait = functools.partial(jax.block_until_ready, (found, state))
                    found, state = self._workers.awaited(wait)
                gather_rows = self._trainer.gather_rows
                outputs.append(outputs_on_host(found, gather_rows))
        record_jax_state(self._model, self._kind, state)
        is_predict = self._kind == "predict"
        result = compiled_steps.concatenated(outputs) if is_predict else outputs[-1]
        return jax.tree.map(lambda array: np.asarray(local_value(array)), result)

    def _current_step(self) -> compiled_steps.Step:
        if self._step is None or self._group is not self._workers.group:
            self._group = self._workers.group
            self._step = self._trainer.step(self._model, self._kind)
        return self._step


def _is_split(batch: Any) -> bool:
    """Whether rows are on several devices, so that their step has a collective."""
    leaves = jax.tree.leaves(batch)
    return not all(leaf.sharding.is_fully_replicated for leaf in leaves)
