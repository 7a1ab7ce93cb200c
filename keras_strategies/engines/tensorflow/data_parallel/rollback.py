"""Rollback of steps on TensorFlow.

A variable is saved as a reference to its tensor, which makes TensorFlow copy the tensor
at the next update instead of updating it in place. So weights and slots are saved only
for programs in which one of them may change before the last collective.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_strategies.communication.communicator import is_fixed
from keras_strategies.communication.joined_workers import joined_workers
from keras_strategies.engines.tensorflow.compat.operations import operation_seeds
from keras_strategies.engines.tensorflow.workers.worker_collectives import (
    TensorFlowCommunicator,
)
from keras_strategies.keras_compat.models.building import all_variables
from keras_strategies.keras_compat.variables.values import raw_value
from keras_strategies.runtime.drivers import RollbackDriver

# Operations on a variable's handle that do not change its value.
_READS = ("ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape")


class TensorFlowRollback(RollbackDriver):
    """Saves the values that a step changes before its last collective.

    Args:
        forget_proofs: drops the proofs of layers, which workers agree on.
        workers: the communicator between workers.
    """

    def __init__(
        self, forget_proofs: Callable[[], None], workers: TensorFlowCommunicator
    ):
        self._forget_proofs = forget_proofs
        self._workers = workers
        self._has_exchanged = True
        self._exchanges: weakref.WeakKeyDictionary[Any, bool] = (
            weakref.WeakKeyDictionary()
        )
        self._safe: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
        self._model: Any = None
        self._saved: dict[int, tuple[Any, Any]] = {}
        # Programs of the step under way.
        self._programs = 0

    def save_state(self, model: Any, kind: str) -> Callable[[], bool]:
        late = _late(model)
        restore = self.save_variables(
            [v for v in all_variables(model) if id(v) not in late]
        )
        self._model, self._programs = model, 0
        return restore

    def save_variables(self, variables: Sequence[Any]) -> Callable[[], bool]:
        self._model = None
        saved = self._saved = {}
        with tf.init_scope():
            self._add(variables)
        seeds = operation_seeds().getstate()

        def restore() -> bool:
            operation_seeds().setstate(seeds)
            for variable, value in saved.values():
                variable.assign(value)
            return True

        return restore

    def begin_step(self) -> None:
        """Begins a step, or several, at most one such action ahead of other workers."""
        if not self._has_exchanged:
            # Without a collective, workers would be several actions apart, and those
            # that are behind could not take the state of another one.
            self._workers.group.barrier("a step")
        self._has_exchanged = False

    def begin_program(self, program: Any) -> None:
        """Saves weights and slots if a program of the step needs it.

        Args:
            program: a `ConcreteFunction`; None if it is unknown or code runs eagerly.
        """
        if self._model is None:
            # A custom loop: all variables are saved already.
            return
        self._programs += 1
        if program is not None and program not in self._safe:
            self._safe[program] = _updates_at_last(program.graph, _late(self._model))
            self._exchanges[program] = _last_collective(program.graph) is not None
        self._has_exchanged |= program is not None and self._exchanges[program]
        if self._programs > 1 or program is None or not self._safe[program]:
            self._add(all_variables(self._model))

    def _add(self, variables: Any) -> None:
        for variable in variables:
            raw = raw_value(variable)
            if raw is None or id(variable) in self._saved:
                continue
            # A variable created in a trace may not have its value yet.
            with contextlib.suppress(tf.errors.FailedPreconditionError):
                self._saved[id(variable)] = (variable, raw.read_value())

    def reformed(self, model: Any, has_new: bool) -> None:
        self._saved, self._has_exchanged = {}, True
        if has_new:
            self._forget_proofs()


def _late(model: Any) -> dict[int, Any]:
    """Weights and slots, which change after gradients were exchanged."""
    optimizer = getattr(model, "optimizer", None)
    found = list(model.trainable_variables)
    if optimizer is not None:
        found += optimizer.variables
    return {id(variable): variable for variable in found}


def _updates_at_last(graph: Any, late: dict[int, Any]) -> bool:
    """Whether every update of weights and slots waits for all collectives.

    Args:
        graph: the graph of a program.
        late: weights and slots, by their ids.
    """
    if any(
        node.op.startswith("Collective")
        for function in graph.as_graph_def().library.function
        for node in function.node_def
    ):
        return False
    handles = {
        id(inner)
        for outer, inner in graph.captures
        if any(outer is raw_value(variable).handle for variable in late.values())
    }
    operations = graph.get_operations()
    last = _last_collective(graph)
    if last is None:
        return True
    after = {operations[last]}
    for operation in operations:
        before = [tensor.op for tensor in operation.inputs]
        if any(op in after for op in (*before, *operation.control_inputs)):
            after.add(operation)
        elif operation.type not in _READS and any(
            id(tensor) in handles for tensor in operation.inputs
        ):
            return False
    return True


def _last_collective(graph: Any) -> int | None:
    """The position of the last collective that is always executed; None without."""
    found = enumerate(graph.get_operations())
    return max((i for i, op in found if op.type.startswith("Collective")), default=None)


def after_gradients(apply: Callable[..., Any]) -> Callable[..., Any]:
    """`optimizer.apply` in a program that may be rolled back, after all gradients.

    Without this control dependency, weight decay and counters could be updated while
    gradients are still exchanged.
    """
    if is_fixed(joined_workers()):
        return apply

    @functools.wraps(apply)
    def wrapped(gradients: Any, *args: Any, **kwargs: Any) -> Any:
        gradients = list(gradients)
        with tf.control_dependencies([g for g in gradients if g is not None]):
            return apply(gradients, *args, **kwargs)

    return wrapped
