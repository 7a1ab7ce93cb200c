"""Functions, models and values of workers: sent once, called by many tasks."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keras_strategies.keras_compat.models.building import compiled_parts
from keras_strategies.keras_compat.models.layers import layer_settings
from keras_strategies.parameter_server.coordinator.cluster_state import QueuedTask
from keras_strategies.parameter_server.coordinator.pipelines import Pipelines
from keras_strategies.parameter_server.coordinator.remote_values import (
    PerWorkerValues,
    RemoteValue,
    as_sent,
)
from keras_strategies.parameter_server.coordinator.scheduler import Scheduler
from keras_strategies.parameter_server.engines.composite_tensors import (
    expanded,
    on_host,
)
from keras_strategies.parameter_server.variables.captured_state import CapturedState
from keras_strategies.parameter_server.variables.object_pickling import (
    ObjectPickler,
    PickledObject,
    WorkerValue,
)
from keras_strategies.parameter_server.variables.optimizer_registry import (
    OptimizerRegistry,
)
from keras_strategies.parameter_server.variables.variable_registry import (
    VariableRegistry,
)
from keras_strategies.parameter_server.variables.weak_numbers import WeakNumbers
from keras_strategies.parameter_server.wire.server_connections import ServerConnections
from keras_strategies.parameter_server.wire.task_messages import (
    FunctionDefinition,
    ReleasedNumbers,
    WorkerReference,
    WorkerResource,
)
from keras_strategies.runtime.compiled_functions import original_function
from keras_strategies.strategies.base.strategy import Strategy
from keras_strategies.user_warnings import warn_user

#: Number of times that a function is sent until a warning.
_RESENT = 10


@dataclass(frozen=True)
class ModelDefinition:
    """A model's step on the workers.

    Args:
        number: int, of its `FunctionDefinition`.
        local: tuple of int, numbers of the metrics' variables.
        uses: the variables and optimizers of the model.
    """

    number: int
    local: tuple[int, ...]
    uses: _UsedObjects


class _UsedObjects:
    """Objects that exist as long as a task that uses them.

    Args:
        objects: sequence of objects.
    """

    def __init__(self, objects: Sequence[Any]):
        self.objects = objects


@dataclass(frozen=True)
class _Sent:
    """A definition that has been sent.

    Args:
        number: int, of the `FunctionDefinition`.
        local: tuple of int, numbers of variables on no server.
        variables: tuple of int, numbers of all variables.
        optimizers: tuple of int, numbers of optimizers.
        worker_values: weak references to values that exist once per worker.
        settings: of a model's layers and its other parts.
    """

    number: int
    local: tuple[int, ...]
    variables: tuple[int, ...]
    optimizers: tuple[int, ...]
    worker_values: tuple[weakref.ref[WorkerValue], ...] = ()
    settings: Any = None


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
        self._definitions: dict[int, _Sent] = {}
        # What functions refer to, by the number of the definition.
        self._states: dict[int, CapturedState] = {}
        # Definitions of functions, and of their calls by `strategy.run`.
        self._calls = {"schedule": WeakNumbers(), "run": WeakNumbers()}
        # Definitions of models by the model's number and the kind of the step.
        self._model_steps: dict[tuple[int, str], int] = {}
        self._used: weakref.WeakValueDictionary[int, _UsedObjects] = (
            weakref.WeakValueDictionary()
        )
        # Definitions that no later task uses.
        self._replaced: list[int] = []

    # Calls

    def schedule(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> RemoteValue:
        """Schedules a call of a function; see `ClusterCoordinator.schedule`."""
        return self._schedule(fn, args, kwargs, "schedule")

    def _schedule(
        self, fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any], how: str
    ) -> RemoteValue:
        self._scheduler.tasks.raise_error()
        self.release()
        sent, uses = self._definition(fn, how)
        sends = self._dump(as_sent((tuple(args), dict(kwargs))))
        value = RemoteValue()
        self._scheduler.schedule(
            QueuedTask(
                sent.number,
                sends.blob,
                sends.generation,
                value.set,
                tuple({*sent.local, *_local(sends)}),
                (uses, self._used_objects(sends)),
                variables=tuple(sends.variables),
                worker_values=sends.worker_numbers,
            )
        )
        return value

    def schedule_steps(
        self,
        definition: ModelDefinition,
        batches: list[Any],
        pipelines: Pipelines | None = None,
        readers: PerWorkerValues | None = None,
    ) -> RemoteValue:
        """Schedules a model's steps.

        Args:
            definition: the model's.
            batches: list of batches of arrays and composite tensors.
            pipelines: the pipelines that workers read batches from, instead.
            readers: their readers.
        """
        batches = [expanded(batch, on_host) for batch in batches]
        value = RemoteValue()
        number, local = definition.number, definition.local
        uses = (definition.uses, readers)
        self._scheduler.schedule(
            QueuedTask(number, batches, 0, value.set, local, uses, pipelines=pipelines)
        )
        return value

    def run(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Runs `strategy.run` on a worker and waits for the result, as tensors."""
        value = self._schedule(fn, args, kwargs, "run")
        try:
            return value.get()
        except Exception as error:
            self._scheduler.tasks.discard_error(error)
            raise

    # Values of each worker

    def add_value(self, fn: Callable[[], Any]) -> PerWorkerValues:
        """Defines a value that each worker creates at its first use."""
        made = self._pickler.dump(fn)
        resource = WorkerResource(
            next(self._numbers),
            "value",
            made.blob,
            made.generation,
            made.worker_numbers,
        )
        return self._add_resource(resource, fn)

    def add_iterator(self, dataset: PerWorkerValues) -> PerWorkerValues:
        """Defines an iterator over each worker's dataset."""
        number = dataset.reference.number
        resource = WorkerResource(next(self._numbers), "iterator", number, 0, (number,))
        return self._add_resource(resource, dataset)

    def _add_resource(self, resource: WorkerResource, source: Any) -> PerWorkerValues:
        self._scheduler.add_resource(resource)
        return PerWorkerValues(
            WorkerReference(resource.number),
            source,
            self.add_iterator,
            self._scheduler.release_resource,
        )

    # Definitions

    def _definition(self, fn: Any, how: str) -> tuple[_Sent, _UsedObjects]:
        function = original_function(fn)
        number = self._calls[how].get(function)
        uses = None if number is None else self._uses(number)
        state = None if number is None else self._states[number]
        changes = [] if state is None else state.changes(function)
        if number is None or uses is None or changes:
            self._replace(number)
            step = _run_step(self._strategy, function) if how == "run" else function
            number, uses = self._define("call", step, function)
            self._calls[how].set(function, number)
            self._states[number] = CapturedState(function)
            # Here tensors are compared by their identities.
            self._states[number].forget_tensors()
            if state is not None:
                self._states[number].resent = state.resent + bool(changes)
                self._warn_of_resending(function, self._states[number], changes)
        return self._definitions[number], uses

    def _warn_of_resending(
        self, function: Any, state: CapturedState, changes: list[str]
    ) -> None:
        if changes and state.resent == _RESENT:
            warn_user(
                f"{_name('call', function)} has been sent to workers {_RESENT} times, "
                f"since objects that it refers to had changed: {', '.join(changes)}. "
                "Its steps are compiled again each time. Pass what changes as an "
                "argument, or store it in a `keras.Variable` of the scope."
            )

    def model_definition(self, model: Any, kind: str) -> ModelDefinition:
        """The definition of a model's step, sent again when the model has changed.

        Args:
            model: Keras model.
            kind: str, `"train"`, `"test"` or `"predict"`.
        """
        self.release()
        number_of = self._pickler.number_of
        # A model that is not compiled can predict.
        parts = (getattr(model, "optimizer", None), *compiled_parts(model))
        settings = (
            layer_settings(model),
            *(None if part is None else number_of(part) for part in parts),
            len(model.variables),
        )
        key = (number_of(model), kind)
        number = self._model_steps.get(key)
        uses = None if number is None else self._uses(number)
        if (
            number is None
            or uses is None
            or self._definitions[number].settings != settings
        ):
            self._replace(number)
            number, uses = self._define(kind, model, model, settings)
            self._model_steps[key] = number
        return ModelDefinition(number, self._definitions[number].local, uses)

    def _replace(self, number: int | None) -> None:
        if number is not None:
            self._replaced.append(number)

    def _define(
        self, kind: str, what: Any, named: Any, settings: Any = None
    ) -> tuple[int, _UsedObjects]:
        """Sends a definition; returns its number and what it uses.

        Args:
            kind: str, see `FunctionDefinition`.
            what: the function or the model.
            named: the function or the model to name in messages.
            settings: of a model.
        """
        sends = self._dump(what)
        self._registry.warn_of_imbalance()
        number = next(self._numbers)
        self._scheduler.define(
            FunctionDefinition(
                number,
                kind,
                sends.blob,
                sends.generation,
                tuple(sends.variables),
                _name(kind, named),
                sends.worker_numbers,
            )
        )
        self._definitions[number] = _Sent(
            number,
            _local(sends),
            tuple(sends.variables),
            tuple(map(self._pickler.number_of, sends.optimizers)),
            tuple(map(weakref.ref, sends.worker_values)),
            settings,
        )
        uses = self._uses(number)
        assert uses is not None, "the pickled objects exist"
        return number, uses

    def _uses(self, number: int) -> _UsedObjects | None:
        """Objects that a definition uses; None if one of them no longer exists.

        A function may refer to another model than before.
        """
        uses = self._used.get(number)
        if uses is None:
            sent = self._definitions[number]
            objects = [
                *map(self._registry.find, sent.variables),
                *map(self._pickler.find, sent.optimizers),
                *(reference() for reference in sent.worker_values),
            ]
            if any(found is None for found in objects):
                return None
            self._used[number] = uses = _UsedObjects(objects)
        return uses

    def _used_objects(self, sends: PickledObject) -> _UsedObjects:
        """Objects that pickled arguments use."""
        variables = map(self._registry.find, sends.variables)
        return _UsedObjects([*variables, *sends.optimizers, *sends.worker_values])

    def _dump(self, what: Any) -> PickledObject:
        """Pickles an object for workers, and sends servers the optimizers in it."""
        sends = self._pickler.dump(what)
        if self._optimizers.send_all(sends.optimizers, sends.variables):
            # Optimizers have been built, or their variables have been moved.
            sends = self._pickler.dump(what)
        return sends

    # Release

    def release(self) -> None:
        """Releases variables, optimizers and functions that no longer exist.

        Servers and workers discard them. Tasks refer to everything that they use, so
        objects of a task under way are not released.
        """
        self._registry.delete_released()
        variables = self._registry.take_deleted()
        objects = self._pickler.take_released()
        self._optimizers.release(objects)
        for key in [key for key in self._model_steps if key[0] in objects]:
            self._replaced.append(self._model_steps.pop(key))
        for calls in self._calls.values():
            self._replaced += calls.take_released()
        # A task under way uses its definition.
        definitions = [number for number in self._replaced if number not in self._used]
        if not (variables or objects or definitions):
            return
        for number in definitions:
            self._replaced.remove(number)
            del self._definitions[number]
            self._states.pop(number, None)
        self._scheduler.release(
            ReleasedNumbers(tuple(definitions), tuple(variables), tuple(objects))
        )


def _local(sends: PickledObject) -> tuple[int, ...]:
    """Numbers of the variables on no server in a pickled object."""
    return tuple(n for n, found in sends.variables.items() if found.kind == "local")


def _run_step(strategy: Strategy, fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls `strategy.run` on a worker."""

    def step(*args: Any, **kwargs: Any) -> Any:
        return strategy.run(fn, args, kwargs)

    return step


def _name(kind: str, what: Any) -> str:
    """The name of a function or of a model's step in messages."""
    if kind != "call":
        return f"the {kind} step of model {what.name!r}"
    code = getattr(what, "__code__", None)
    name = getattr(what, "__qualname__", type(what).__name__).split("<locals>.")[-1]
    if code is None:
        return f"function {name!r}"
    return f"function {name!r} ({Path(code.co_filename).name}:{code.co_firstlineno})"
