"""Programs of a worker's steps: one for each model step and each function."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import keras
import numpy as np

from keras_strategies.parameter_server.engines.engine_interface import (
    LookupMismatchError,
    StepProgram,
    StepResult,
)
from keras_strategies.parameter_server.variables.object_pickling import contents_key
from keras_strategies.parameter_server.worker.step_execution import (
    PullPlan,
    StepExecution,
)


class StepPrograms:
    """Programs of models and functions, built at their first step.

    Args:
        execution: servers, variables and engine.
    """

    def __init__(self, execution: StepExecution):
        self.execution = execution
        self.variables = execution.variables
        #: Whether variables have local values instead of the servers'.
        self.in_program = True  # Until a task runs.
        # Programs of each definition, with what must exist as long.
        self._programs: dict[int, dict[Hashable, tuple[StepProgram, Any]]] = {}

    def clear(self) -> None:
        """Discards all programs."""
        self._programs.clear()

    def release(self, definition: int) -> None:
        """Discards the programs of a definition."""
        self._programs.pop(definition, None)

    def of_model(
        self, number: int, model: Any, kind: str, variables: tuple[int, ...]
    ) -> StepProgram:
        """The program of a model's step.

        Args:
            number: int, of the step's definition.
            model: Keras model.
            kind: str, `"train"`, `"test"` or `"predict"`.
            variables: tuple of int, numbers of the model's variables.
        """
        own = self._programs.setdefault(number, {})
        if kind not in own:
            engine = self.execution.engine
            body = engine.model_body(model, kind)
            step_variables = self.execution.step_variables(variables)
            own[kind] = engine.program(body, step_variables, kind == "train"), model
        return own[kind][0]

    def of_function(
        self,
        definition: int,
        fn: Callable[..., Any],
        arguments: Any,
        numbers: tuple[int, ...],
    ) -> tuple[StepProgram, Any]:
        """The program of a function, and the arrays among its arguments.

        Args:
            definition: int, of the scheduled function that calls it.
            fn: callable.
            arguments: structure.
            numbers: tuple of int, the variables of the scheduled function and its
                arguments.
        """
        own = self._programs.setdefault(definition, {})
        leaves = keras.tree.flatten(arguments)
        sent = [is_array(leaf) for leaf in leaves]
        rest = [None if a else x for a, x in zip(sent, leaves, strict=True)]
        shape = keras.tree.map_structure(lambda leaf: 0, arguments)
        others = None if all(sent) else contents_key(rest)
        key = (id(fn), repr(shape), others, numbers)
        if key not in own:

            def body(arrays: Any) -> Any:
                found = iter(arrays)
                filled = [
                    next(found) if a else x for a, x in zip(sent, rest, strict=True)
                ]
                args, kwargs = keras.tree.pack_sequence_as(arguments, filled)
                return fn(*args, **kwargs)

            variables = self.execution.step_variables(numbers)
            # The `id`s in the key must not be reused.
            kept = (fn, rest)
            own[key] = self.execution.engine.program(body, variables, True), kept
        batch = [to_numpy(leaf) for a, leaf in zip(sent, leaves, strict=True) if a]
        return own[key][0], batch

    def compute(
        self, program: StepProgram, plan: PullPlan, pulled: Any, batch: Any
    ) -> StepResult:
        """Runs a program on the pulled values."""
        result = self._run(program, plan, pulled, batch)
        # A program may return a variable as it is.
        result.outputs = keras.tree.map_structure(self._copy_shared, result.outputs)
        return result

    def _copy_shared(self, value: Any) -> Any:
        """A copy of an array in shared memory; other values unchanged."""
        if isinstance(value, np.ndarray) and self.execution.servers.is_shared(value):
            return np.array(value)
        return value

    def _run(
        self, program: StepProgram, plan: PullPlan, pulled: Any, batch: Any
    ) -> StepResult:
        with self.inside_program():
            if plan.matches(program):
                self.execution.load_values(program, plan, pulled)
                try:
                    return program.run(batch, plan.lookups, plan.positions)
                except LookupMismatchError:
                    program.disable_lookup_prediction()
            # Nothing has been pushed: the step restarts without predicted lookups.
            again = self.execution.plan(program, batch)
            plan.ids, plan.lookups = again.ids, again.lookups
            plan.positions = again.positions
            plan.pulls, plan.dense = again.pulls, again.dense
            servers = self.execution.servers
            # Without shared memory: values of later steps may be in it.
            numbers = servers.send_steps(plan.pulls, shares_memory=False)
            self.execution.load_values(program, plan, servers.receive_steps(numbers))
            return program.run(batch, plan.lookups, plan.positions)

    @contextlib.contextmanager
    def inside_program(self) -> Iterator[None]:
        """Variables have local values in this context, instead of the servers'."""
        before, self.in_program = self.in_program, True
        try:
            yield
        finally:
            self.in_program = before


def is_array(leaf: Any) -> bool:
    """Whether an argument of a step is an array or a tensor: not a variable."""
    if isinstance(leaf, keras.Variable):
        return False
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def to_numpy(value: Any) -> np.ndarray:
    if isinstance(value, np.ndarray):
        return value
    return np.asarray(keras.ops.convert_to_numpy(value))
