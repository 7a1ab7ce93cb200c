"""Functions and values that the coordinator has sent to a worker."""

from __future__ import annotations

from typing import Any

from keras_strategies.parameter_server.variables.object_pickling import (
    UnpicklingContext,
    load,
)
from keras_strategies.parameter_server.wire.task_messages import (
    FunctionDefinition,
    ScheduledTask,
    WorkerReference,
    WorkerResource,
)


class TaskFunctions:
    """Functions, models and per-worker values, unpickled at their first use.

    Args:
        context: the worker's variables.
    """

    def __init__(self, context: UnpicklingContext):
        self._context = context
        self._definitions: dict[int, FunctionDefinition] = {}
        self._functions: dict[int, Any] = {}
        self._resources: dict[int, WorkerResource] = {}
        self._values: dict[int, Any] = {}

    def clear(self) -> None:
        """Discards everything, for a new coordinator with other numbers."""
        for known in (
            self._definitions,
            self._functions,
            self._resources,
            self._values,
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

    def definition(self, task: ScheduledTask) -> FunctionDefinition:
        """The definition of a task's function."""
        return self._definitions[task.definition]

    def function(self, definition: FunctionDefinition) -> Any:
        """The function or the model of a definition."""
        number = definition.number
        if number not in self._functions:
            self._functions[number] = load(
                definition.blob, self._context, definition.generation
            )
        return self._functions[number]

    def arguments(self, task: ScheduledTask) -> Any:
        """Arguments and keyword arguments of a call, with this worker's values."""
        return self._resolved(load(task.arguments, self._context, task.generation))

    def _resolved(self, structure: Any) -> Any:
        if isinstance(structure, WorkerReference):
            return self._value(structure.number)
        if isinstance(structure, (list, tuple)) and type(structure) in (list, tuple):
            return type(structure)(self._resolved(item) for item in structure)
        if type(structure) is dict:
            return {key: self._resolved(item) for key, item in structure.items()}
        return structure

    def _value(self, number: int) -> Any:
        if number not in self._values:
            resource = self._resources[number]
            if resource.kind == "iterator":
                self._values[number] = iter(self._value(resource.blob))
            else:
                make = load(resource.blob, self._context, resource.generation)
                self._values[number] = make()
        return self._values[number]
