"""Rollback of steps on TensorFlow.

A variable is saved as a reference to its tensor, which makes TensorFlow copy the tensor
at the next update instead of updating it in place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_strategies.engines.tensorflow.compat.operations import operation_seeds
from keras_strategies.engines.tensorflow.workers.worker_collectives import (
    TensorFlowCommunicator,
)
from keras_strategies.keras_compat.models.building import all_variables
from keras_strategies.keras_compat.variables.values import raw_value
from keras_strategies.runtime.drivers import RollbackDriver


class TensorFlowRollback(RollbackDriver):
    """Saves the values of all variables before a step.

    Args:
        forget_proofs: drops the proofs of layers, which workers agree on.
        workers: the communicator between workers.
    """

    def __init__(
        self, forget_proofs: Callable[[], None], workers: TensorFlowCommunicator
    ):
        self._forget_proofs = forget_proofs
        self._workers = workers
        # The collectives that had begun before the last step.
        self._begun = -1
        self._model: Any = None
        self._saved: dict[int, tuple[Any, Any]] = {}

    def save_state(self, model: Any, kind: str) -> Callable[[], bool]:
        self._model, self._saved = model, {}
        saved = self._saved
        self.save_new_variables()
        seeds = operation_seeds().getstate()

        def restore() -> bool:
            operation_seeds().setstate(seeds)
            for variable, value in saved.values():
                variable.assign(value)
            return True

        return restore

    def save_new_variables(self) -> None:
        """Saves those that were created since the step has begun, such as slots."""
        variables = [] if self._model is None else all_variables(self._model)
        with tf.init_scope():
            for variable in variables:
                raw = raw_value(variable)
                if raw is None or id(variable) in self._saved:
                    continue
                # A variable created in a trace may not have its value yet.
                with contextlib.suppress(tf.errors.FailedPreconditionError):
                    self._saved[id(variable)] = (variable, raw.read_value())

    def begin_step(self) -> None:
        """Begins a step, or several, at most one such action ahead of other workers."""
        begun = self._workers.collectives_begun
        if begun == self._begun:
            # Without a collective, workers would be several actions apart, and those
            # that are behind could not take the state of another one.
            self._workers.group.barrier("a step")
        self._begun = begun

    def reformed(self, model: Any, has_new: bool) -> None:
        self._saved, self._begun = {}, -1
        if has_new:
            self._forget_proofs()
