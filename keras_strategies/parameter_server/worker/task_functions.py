"""Functions and values that the coordinator has sent to a worker."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from keras_strategies.errors import InvalidArgumentError
from keras_strategies.parameter_server.variables.captured_state import CapturedState
from keras_strategies.parameter_server.variables.object_pickling import (
    UnpicklingContext,
    load,
)
from keras_strategies.parameter_server.wire.task_messages import (
    FunctionDefinition,
    ScheduledTask,
    WorkerResource,
)


class TaskFunctions:
    """Functions, models and per-worker values, unpickled at their first use.

    Args:
        context: the worker's variables.
        running: callable that returns a context manager for functions of users.
    """

    def __init__(
        self,
        context: UnpicklingContext,
        running: Callable[[], contextlib.AbstractContextManager[None]],
    ):
        self._context = context
        self._running = running
        self._definitions: dict[int, FunctionDefinition] = {}
        self._functions: dict[int, Any] = {}
        self._resources: dict[int, WorkerResource] = {}
        self._values: dict[int, Any] = {}
        # What functions refer to, from their first call on.
        self._states: dict[int, CapturedState] = {}
        context.worker_values = self._values

    def clear(self) -> None:
        """Discards everything, for a new coordinator with other numbers."""
        for known in (
            self._definitions,
            self._functions,
            self._resources,
            self._values,
            self._states,
        ):
            known.clear()

    def define(self, definition: FunctionDefinition) -> None:
        self._definitions[definition.number] = definition

    def add_resource(self, resource: WorkerResource) -> None:
        self._resources[resource.number] = resource

    def release(self, number: int) -> None:
        """Discards a definition and its function."""
        self._definitions.pop(number, None)
        self._functions.pop(number, None)
        self._states.pop(number, None)

    def release_values(self, numbers: Iterable[int]) -> list[Any]:
        """Discards values of this worker; returns those that have been created."""
        for number in numbers:
            self._resources.pop(number, None)
        return [self._values.pop(n) for n in numbers if n in self._values]

    def definition(self, task: ScheduledTask) -> FunctionDefinition:
        """The definition of a task's function."""
        return self._definitions[task.definition]

    def function(self, definition: FunctionDefinition) -> Any:
        """The function or the model of a definition."""
        number = definition.number
        if number not in self._functions:
            self._create_values(definition.worker_values)
            self._functions[number] = load(
                definition.blob, self._context, definition.generation
            )
        return self._functions[number]

    @contextlib.contextmanager
    def detecting_changes(self, definition: FunctionDefinition) -> Iterator[list[str]]:
        """A context for a call: changes that the coordinator does not see.

        Changes of Python objects are detected in the first call.

        Returns:
            A list of names, filled at the end: objects that the function refers to.

        Raises:
            ValueError: if a Torch tensor was changed.
        """
        function = self.function(definition)
        is_first = definition.number not in self._states
        if is_first:
            found = CapturedState(function, self._values.values())
            self._states[definition.number] = found
        state = self._states[definition.number]
        changes: list[str] = []
        yield changes
        tensors = state.changed_tensors()
        if tensors:
            kinds = {f"{type(t).__name__} of shape {tuple(t.shape)}" for t in tensors}
            raise InvalidArgumentError(
                f"{definition.name} changed tensors that it refers to: "
                f"{', '.join(sorted(kinds))}. A worker has copies of them, and what "
                "it changes would be lost. Store state in a `keras.Variable` or a "
                "Keras layer of the strategy's scope, or return it."
            )
        if is_first:
            changes += state.changes(function)

    def arguments(self, task: ScheduledTask) -> Any:
        """Arguments and keyword arguments of a call, with this worker's values."""
        self._create_values(task.worker_values)
        return load(task.arguments, self._context, task.generation)

    def value(self, number: int) -> Any:
        """This worker's value of a `WorkerResource`."""
        self._create_values((number,))
        return self._values[number]

    def _create_values(self, numbers: Iterable[int]) -> None:
        """Creates this worker's values: unpickled objects refer to them."""
        for number in numbers:
            if number not in self._values:
                self._values[number] = self._created(self._resources[number])

    def _created(self, resource: WorkerResource) -> Any:
        self._create_values(resource.worker_values)
        if resource.kind == "iterator":
            with self._running():
                return iter(self._values[resource.blob])
        make = load(resource.blob, self._context, resource.generation)
        with self._running():
            return make()
