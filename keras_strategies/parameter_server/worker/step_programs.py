"""Programs of a worker's steps: one for each model step and each function."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from keras_strategies.parameter_server.engines.composite_tensors import (
    composed,
    expanded,
    has_expanded,
)
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


@dataclass(frozen=True)
class _Call:
    """What a function's program was created from, which exists as long.

    Args:
        fn: the function.
        arguments: list, without arrays.
    """

    fn: Callable[..., Any]
    arguments: list[Any]


class _SplitArguments:
    """Arrays of a structure, and its other parts, which a program depends on.

    Args:
        structure: of arrays, tuples of `expanded` for composite tensors, and any other
            values.
    """

    def __init__(self, structure: Any):
        self._structure = structure
        leaves = keras.tree.flatten(structure)
        self._sent = [is_array(leaf) for leaf in leaves]
        pairs = list(zip(self._sent, leaves, strict=True))
        #: The arrays.
        self.arrays = [to_numpy(leaf) for sent, leaf in pairs if sent]
        #: The other leaves, None for arrays.
        self.rest = [None if sent else leaf for sent, leaf in pairs]

    @property
    def key(self) -> Hashable:
        """Equal for structures with equal other parts."""
        shape = keras.tree.map_structure(lambda leaf: 0, self._structure)
        others = None if all(self._sent) else contents_key(self.rest)
        return repr(shape), others

    def body(self, call: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """A function of the arrays that calls one of the structure."""
        sent, rest, structure = self._sent, self.rest, self._structure

        def body(arrays: Any) -> Any:
            found = iter(arrays)
            leaves = [next(found) if a else x for a, x in zip(sent, rest, strict=True)]
            return call(composed(keras.tree.pack_sequence_as(structure, leaves)))

        return body


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

    def release_argument(self, value: Any) -> None:
        """Discards the programs of functions that were called with an object."""
        for programs in self._programs.values():
            for key, (_, kept) in list(programs.items()):
                if isinstance(kept, _Call) and any(value is x for x in kept.arguments):
                    del programs[key]

    def of_model(
        self, number: int, model: Any, kind: str, variables: tuple[int, ...], batch: Any
    ) -> tuple[StepProgram, Any]:
        """The program of a model's step on a batch, and the batch for it.

        Args:
            number: int, of the step's definition.
            model: Keras model.
            kind: str, `"train"`, `"test"` or `"predict"`.
            variables: tuple of int, numbers of the model's variables.
            batch: structure of NumPy arrays, with tuples of `expanded` for composite
                tensors.
        """
        own = self._programs.setdefault(number, {})
        engine = self.execution.engine
        key: Hashable = kind
        split = _SplitArguments(batch) if has_expanded(batch) else None
        if split is not None:
            key = (kind, split.key)
        if key not in own:
            body = engine.model_body(model, kind)
            if split is not None:
                body = split.body(body)
            step_variables = self.execution.step_variables(variables)
            own[key] = engine.program(body, step_variables, kind == "train"), model
        return own[key][0], batch if split is None else split.arrays

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
        split = _SplitArguments(expanded(arguments))
        key = (id(fn), split.key, numbers)
        if key not in own:

            def call(given: Any) -> Any:
                args, kwargs = given
                return expanded(fn(*args, **kwargs))

            variables = self.execution.step_variables(numbers)
            body = split.body(call)
            # The `id`s in the key must not be reused.
            kept = _Call(fn, split.rest)
            own[key] = self.execution.engine.program(body, variables, True), kept
        return own[key][0], split.arrays

    def compute(
        self, program: StepProgram, plan: PullPlan, pulled: Any, batch: Any
    ) -> StepResult:
        """Runs a program on the pulled values."""
        result = self._run(program, plan, pulled, batch)
        # A program may return a variable as it is.
        outputs = keras.tree.map_structure(self._copy_shared, result.outputs)
        result.outputs = composed(outputs)
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
