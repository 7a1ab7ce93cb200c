"""Functions, models and values of workers: sent once, called by many tasks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keras_strategies.keras_compat.models.building import compiled_parts
from keras_strategies.keras_compat.models.layers import layer_settings
from keras_strategies.parameter_server.coordinator.remote_values import (
    RemoteValue,
    with_references,
)
from keras_strategies.parameter_server.coordinator.scheduler import Scheduler
from keras_strategies.parameter_server.variables.object_pickling import ObjectPickler
from keras_strategies.parameter_server.variables.optimizer_registry import (
    OptimizerRegistry,
)
from keras_strategies.parameter_server.variables.variable_registry import (
    VariableRegistry,
)
from keras_strategies.parameter_server.wire.server_connections import ServerConnections
from keras_strategies.parameter_server.wire.task_messages import (
    FunctionDefinition,
    WorkerReference,
    WorkerResource,
)
from keras_strategies.parameter_server.wire.variable_description import (
    VariableDescription,
)
from keras_strategies.runtime.compiled_functions import original_function
from keras_strategies.strategies.base import Strategy


@dataclass(frozen=True)
class ModelDefinition:
    """A model's step on the workers.

    Args:
        number: int, of its `FunctionDefinition`.
        local: tuple of int, numbers of the metrics' variables.
    """

    number: int
    local: tuple[int, ...]


class RemoteFunctions:
    """Sends functions and models to workers, and schedules their calls.

    Args:
        strategy: replaced by the worker's strategy in functions.
        scheduler: assigns tasks to workers.
        registry: the strategy's variables.
        servers: receive optimizers.
        lazy_rows: bool, see `ParameterServerStrategy`.
    """

    def __init__(
        self,
        strategy: Strategy,
        scheduler: Scheduler,
        registry: VariableRegistry,
        servers: ServerConnections,
        lazy_rows: bool,
    ):
        self._strategy = strategy
        self._scheduler = scheduler
        self._registry = registry
        self._pickler = ObjectPickler(registry.describe, strategy)
        self._optimizers = OptimizerRegistry(
            registry, self._pickler, servers, lazy_rows, strategy.scope
        )
        self._numbers = itertools.count()
        self._definitions: dict[Any, tuple[int, tuple[int, ...], Any]] = {}
        # Scheduled functions for `strategy.run` on the coordinator.
        self._steps: dict[int, tuple[Any, Callable[..., Any]]] = {}

    # Calls

    def schedule(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> RemoteValue:
        """Schedules a call of a function; see `ClusterCoordinator.schedule`."""
        self._scheduler.tasks.raise_error()
        number, local, _ = self._definition(fn)
        arguments = with_references((tuple(args), dict(kwargs)))
        blob, generation, _ = self._dump(arguments)
        value = RemoteValue()
        self._scheduler.schedule(number, blob, generation, value.set, local)
        return value

    def schedule_steps(
        self, definition: ModelDefinition, batches: list[Any]
    ) -> RemoteValue:
        """Schedules a model's steps on batches of NumPy arrays."""
        value = RemoteValue()
        self._scheduler.schedule(
            definition.number, batches, 0, value.set, definition.local
        )
        return value

    def run(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Runs `strategy.run` on a worker and waits for the result, as tensors."""
        key = id(fn)
        if key not in self._steps:
            strategy = self._strategy

            def step(*args: Any, **kwargs: Any) -> Any:
                return strategy.run(fn, args, kwargs)

            self._steps[key] = fn, step
        value = self.schedule(self._steps[key][1], args, kwargs)
        try:
            return value.get()
        except Exception as error:
            self._scheduler.tasks.discard_error(error)
            raise

    # Values of each worker

    def add_value(self, fn: Callable[[], Any]) -> WorkerReference:
        """Defines a value that each worker creates at its first use."""
        blob, generation, _, _ = self._pickler.dump(fn)
        number = next(self._numbers)
        self._scheduler.add_resource(WorkerResource(number, "value", blob, generation))
        return WorkerReference(number)

    def add_iterator(self, dataset: WorkerReference) -> WorkerReference:
        """Defines an iterator over each worker's dataset."""
        number = next(self._numbers)
        self._scheduler.add_resource(
            WorkerResource(number, "iterator", dataset.number, 0)
        )
        return WorkerReference(number)

    # Definitions

    def _definition(self, fn: Any) -> tuple[int, tuple[int, ...], Any]:
        function = original_function(fn)
        key = ("call", id(function))
        if key not in self._definitions:
            self._definitions[key] = self._define("call", function)
        return self._definitions[key]

    def model_definition(self, model: Any, kind: str) -> ModelDefinition:
        """The definition of a model's step, sent again when the model has changed.

        Args:
            model: Keras model.
            kind: str, `"train"`, `"test"` or `"predict"`.
        """
        settings = (
            layer_settings(model),
            id(model.optimizer),
            *map(id, compiled_parts(model)),
            len(model.variables),
        )
        key = (kind, id(model))
        known = self._definitions.get(key)
        if known is None or known[2][1] != settings:
            number, local, _ = self._define(kind, model)
            self._definitions[key] = (number, local, (model, settings))
        number, local, _ = self._definitions[key]
        return ModelDefinition(number, local)

    def _define(self, kind: str, what: Any) -> tuple[int, tuple[int, ...], Any]:
        blob, generation, variables = self._dump(what)
        self._registry.warn_of_imbalance()
        number = next(self._numbers)
        numbers = tuple(variables)
        self._scheduler.define(
            FunctionDefinition(
                number, kind, blob, generation, numbers, _name(kind, what)
            )
        )
        local = tuple(
            n for n, description in variables.items() if description.kind == "local"
        )
        return number, local, what

    def _dump(self, what: Any) -> tuple[bytes, int, dict[int, VariableDescription]]:
        """Pickles an object for workers, and sends servers the optimizers in it.

        Returns:
            The bytes, their generation, and the variables in them.
        """
        dump = self._pickler.dump
        blob, generation, variables, optimizers = dump(what)
        if self._optimizers.send_all(optimizers, variables):
            # Optimizers have been built, or their variables have been moved.
            blob, generation, variables, _ = dump(what)
        return blob, generation, variables


def _name(kind: str, what: Any) -> str:
    """The name of a function or of a model's step in messages."""
    if kind != "call":
        return f"the {kind} step of model {what.name!r}"
    code = getattr(what, "__code__", None)
    name = getattr(what, "__qualname__", type(what).__name__).split("<locals>.")[-1]
    if code is None:
        return f"function {name!r}"
    return f"function {name!r} ({Path(code.co_filename).name}:{code.co_firstlineno})"
