"""`ClusterCoordinator`: scheduled functions on the workers of a cluster."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import keras

from keras_strategies import context, keras_compat
from keras_strategies.errors import ClusterTimeoutError, InvalidArgumentError
from keras_strategies.parameter_server.coordinator.cluster_status import (
    Status,
    status_of,
)
from keras_strategies.parameter_server.variables.optimizer_wrappers import (
    has_dynamic_scale,
    innermost,
)
from keras_strategies.parameter_server.wire.task_messages import (
    FunctionDefinition,
    WorkerReference,
    WorkerResource,
)
from keras_strategies.parameter_server.wire.variable_description import (
    VariableDescription,
)
from keras_strategies.runtime.compiled_functions import original_function

if TYPE_CHECKING:
    from keras_strategies.parameter_server.parameter_server_strategy import (
        ParameterServerStrategy,
    )


class RemoteValue:
    """The future return value of a scheduled function.

    Returned by `ClusterCoordinator.schedule`.

    Example:

    >>> value = coordinator.schedule(step_fn)
    >>> value.fetch()
    """

    def __init__(self) -> None:
        self._known = threading.Event()
        self._value: Any = None
        self._error: BaseException | None = None

    def __repr__(self) -> str:
        if not self.is_known():
            return "<RemoteValue, not yet computed>"
        if self._error is not None:
            return f"<RemoteValue, failed: {type(self._error).__name__}: {self._error}>"
        return f"<RemoteValue of {_shortened(self._value)}>"

    def set(self, value: Any, error: BaseException | None) -> None:
        """Sets the value or the error."""
        self._value, self._error = value, error
        self._known.set()

    def is_known(self) -> bool:
        """Whether the value or an error is available."""
        return self._known.is_set()

    def fetch(self, timeout: float | None = None) -> Any:
        """Waits for the value.

        Args:
            timeout: float, seconds; None to wait as long as it takes.

        Returns:
            What the function returned, with NumPy arrays for tensors.

        Raises:
            Exception: what the function raised.
            RuntimeError: as `ks.errors.ClosureCancelledError`, if it was cancelled;
                as `ks.errors.ClusterTimeoutError`, if it took too long.
        """
        if not self._known.wait(timeout):
            raise ClusterTimeoutError(
                f"The function did not return within {timeout:g} seconds."
            )
        if self._error is not None:
            raise self._error
        return self._value

    def get(self, timeout: float | None = None) -> Any:
        """As `fetch`, with tensors of the backend for arrays."""
        return keras.tree.map_structure(_to_tensor, self.fetch(timeout))


class PerWorkerValues:
    """Reference to a value that exists once per worker.

    Created by `create_per_worker_values` and `create_per_worker_dataset`, and passed to
    scheduled functions, which receive the value of their worker. A restarted worker
    creates its value again.
    """

    def __init__(self, coordinator: ClusterCoordinator, reference: WorkerReference):
        self._coordinator = coordinator
        self.reference = reference

    def __repr__(self) -> str:
        return f"<PerWorkerValues, one on each worker of {self._coordinator!r}>"

    def __iter__(self) -> PerWorkerValues:
        """An iterator over each worker's dataset, for scheduled functions."""
        return self._coordinator._iterator_of(self)

    def __next__(self) -> Any:
        raise TypeError(
            "This iterator is over each worker's own dataset. Pass it to a scheduled "
            "function, `coordinator.schedule(fn, args=(iterator,))`, and call `next` "
            "there."
        )


class ClusterCoordinator:
    """Schedules functions on workers and reschedules those of lost workers.

    Each strategy has one; creating it again returns the same object.

    Args:
        strategy: a `ParameterServerStrategy`.

    Raises:
        ValueError: for another strategy.

    Example:

    >>> coordinator = ks.ClusterCoordinator(strategy)
    >>> per_worker_dataset = coordinator.create_per_worker_dataset(dataset_fn)
    >>> iterator = iter(per_worker_dataset)
    >>> for _ in range(steps):
    ...     coordinator.schedule(step_fn, args=(iterator,))
    >>> coordinator.join()
    """

    def __new__(cls, strategy: Any) -> ClusterCoordinator:
        made = getattr(strategy, "_coordinator", None)
        if not hasattr(strategy, "cluster"):
            raise InvalidArgumentError(
                "A ClusterCoordinator requires a ks.ParameterServerStrategy. "
                f"Received: {strategy!r}"
            )
        if made is None:
            made = super().__new__(cls)
            made._set_up(strategy)
            strategy._coordinator = made
        found: ClusterCoordinator = made
        return found

    def _set_up(self, strategy: ParameterServerStrategy) -> None:
        self._strategy = strategy
        self._cluster = strategy.cluster
        self._registry = strategy.registry
        self._numbers = itertools.count()
        self._definitions: dict[Any, tuple[int, tuple[int, ...], Any]] = {}
        # Scheduled functions for `strategy.run` on the coordinator.
        self._steps: dict[Any, tuple[Any, Callable[..., Any]]] = {}
        self._started = time.monotonic()

    def __repr__(self) -> str:
        return f"<ClusterCoordinator of {self._strategy!r}>"

    @property
    def strategy(self) -> ParameterServerStrategy:
        """The strategy."""
        return self._strategy

    def schedule(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> RemoteValue:
        """Schedules a function on any worker; returns immediately.

        Blocks only while the queue is full. The function is pickled by cloudpickle and
        sent once, with the models and variables that it refers to. Its updates of
        variables are applied exactly once, also if it runs again because a worker
        died. Within `strategy.run` or a `ks.function`, only the looked-up rows of
        large tables are sent.

        Args:
            fn: callable; a `ks.function` or `tf.function` too.
            args: sequence of arguments; per-worker values are replaced by the worker's.
            kwargs: dict of keyword arguments, likewise.

        Returns:
            A `RemoteValue`.

        Raises:
            Exception: the first error of an earlier scheduled function, once.
            TypeError: if `fn` is not callable.
        """
        if not callable(fn):
            raise TypeError(
                "`schedule` requires a callable. Received: "
                f"{fn!r} of type {type(fn).__name__}"
            )
        scheduler = self._cluster.scheduler
        scheduler.raise_error()
        number, local, _ = self._definition(fn)
        arguments = _with_references((tuple(args or ()), dict(kwargs or {})))
        blob, generation, _ = self._dump(arguments)
        value = RemoteValue()
        scheduler.schedule(number, blob, generation, value.set, local)
        return value

    def run_now(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Runs `strategy.run` on a worker and waits for the result, as tensors."""
        key = ("run", id(fn))
        if key not in self._steps:
            strategy = self._strategy

            def step(*args: Any, **kwargs: Any) -> Any:
                return strategy.run(fn, args, kwargs)

            self._steps[key] = fn, step
        value = self.schedule(self._steps[key][1], args, kwargs)
        try:
            return value.get()
        except Exception as error:
            self._cluster.scheduler.discard_error(error)
            raise

    def join(self, timeout: float | None = None) -> None:
        """Waits until all scheduled functions are done.

        Args:
            timeout: float, seconds; None to wait as long as it takes.

        Raises:
            Exception: the first error of a scheduled function, once. Queued functions
                are cancelled, and the coordinator can be used again.
            RuntimeError: as `ks.errors.ServerLostError`, if a parameter server died
                and cannot be restored; as `ks.errors.ClusterTimeoutError`.
        """
        self._cluster.scheduler.wait_until_done(timeout)

    def done(self) -> bool:
        """Whether all scheduled functions are done.

        Raises:
            Exception: as `join`.
        """
        return self._cluster.scheduler.is_done()

    def fetch(self, val: Any) -> Any:
        """Waits for values.

        Args:
            val: structure of `RemoteValue`s and other things.

        Returns:
            The structure, with what the functions returned.
        """
        return keras.tree.map_structure(
            lambda v: v.fetch() if isinstance(v, RemoteValue) else v, val
        )

    def create_per_worker_dataset(
        self, dataset_fn: Callable[..., Any]
    ) -> PerWorkerValues:
        """Creates a dataset on each worker.

        Args:
            dataset_fn: callable without arguments that returns a dataset of any kind,
                or a dataset that can be pickled; called on each worker.

        Returns:
            `PerWorkerValues`; `iter` of it creates an iterator on each worker.
        """
        if not callable(dataset_fn):
            dataset = dataset_fn
            dataset_fn = lambda: dataset  # noqa: E731
        return self.create_per_worker_values(original_function(dataset_fn))

    def create_per_worker_values(self, fn: Callable[[], Any]) -> PerWorkerValues:
        """Creates a value on each worker, when it is first used there.

        Args:
            fn: callable without arguments.

        Returns:
            `PerWorkerValues`, to be passed to scheduled functions.

        Raises:
            TypeError: if `fn` is not callable.
        """
        if not callable(fn):
            raise TypeError(
                "`create_per_worker_values` requires a callable that returns the "
                f"value. Received: {fn!r}"
            )
        blob, generation, _, _ = self._registry.dump(fn, self._is_strategy)
        number = next(self._numbers)
        self._cluster.scheduler.add_resource(
            WorkerResource(number, "value", blob, generation)
        )
        return PerWorkerValues(self, WorkerReference(number))

    def _iterator_of(self, values: PerWorkerValues) -> PerWorkerValues:
        number = next(self._numbers)
        self._cluster.scheduler.add_resource(
            WorkerResource(number, "iterator", values.reference.number, 0)
        )
        return PerWorkerValues(self, WorkerReference(number))

    def status(self) -> Status:
        """A table of the workers and servers: alive, steps, queue, bytes.

        Returns:
            A `Status`: text in a terminal, a table in a notebook.
        """
        return status_of(self._cluster, self._strategy)

    def add_worker(self) -> int:
        """Starts another worker, in a cluster that the strategy has started.

        It receives work as soon as it is ready. In other clusters a worker joins when
        its process calls `ks.Server`.

        Returns:
            int, the worker's number.

        Raises:
            ValueError: if the strategy does not start the processes.
        """
        if not self._cluster.is_local:
            raise InvalidArgumentError(
                "The processes of this cluster are not started by the strategy. Start "
                "another one with `ks.Server(...).join()` and a new task index."
            )
        return self._cluster.scheduler.add_worker()

    # Definitions, also for `fit`

    def _is_strategy(self, made: Any) -> bool:
        return made is self._strategy

    def _definition(self, fn: Any) -> tuple[int, tuple[int, ...], Any]:
        function = original_function(fn)
        key = ("call", id(function))
        if key not in self._definitions:
            self._definitions[key] = self._define("call", function)
        return self._definitions[key]

    def model_definition(self, model: Any, kind: str) -> tuple[int, tuple[int, ...]]:
        """Numbers of a model's step and of its metrics' variables."""
        settings = (
            keras_compat.layer_settings(model),
            id(model.optimizer),
            *map(id, keras_compat.compiled_parts(model)),
            len(model.variables),
        )
        key = (kind, id(model))
        known = self._definitions.get(key)
        if known is None or known[2][1] != settings:
            number, local, _ = self._define(kind, model)
            self._definitions[key] = (number, local, (model, settings))
        return self._definitions[key][:2]

    def _define(self, kind: str, what: Any) -> tuple[int, tuple[int, ...], Any]:
        blob, generation, variables = self._dump(what)
        self._registry.warn_of_imbalance()
        number = next(self._numbers)
        numbers = tuple(variables)
        self._cluster.scheduler.define(
            FunctionDefinition(number, kind, blob, generation, numbers)
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
        dump = self._registry.dump
        blob, generation, variables, optimizers = dump(what, self._is_strategy)
        if self._send_optimizers(optimizers, variables):
            # Optimizers have been built, or their variables have been moved.
            blob, generation, variables, _ = dump(what, self._is_strategy)
        return blob, generation, variables

    def _send_optimizers(
        self, optimizers: Sequence[Any], variables: Mapping[int, Any]
    ) -> bool:
        """Sends servers the optimizers; returns whether any placement has changed."""
        inner = [innermost(o) for o in optimizers if has_dynamic_scale(o)]
        inner += [each for o in optimizers for each in keras_compat.optimizers_of(o)]
        # Wrapped optimizers are built with their wrapper.
        unbuilt = [
            o for o in optimizers if not (o.built or any(o is each for each in inner))
        ]
        if len(unbuilt) > 1:
            raise InvalidArgumentError(
                f"{len(unbuilt)} optimizers have not been built, so their variables "
                "are ambiguous. Call `optimizer.build(variables)` in "
                "the strategy's scope."
            )
        if unbuilt:
            trainable = [
                self._registry.variable(number)
                for number, description in variables.items()
                if description.kind == "weight" and description.trainable
            ]
            if not trainable:
                return False
            with self._strategy.scope():
                unbuilt[0].build(trainable)
            made = keras_compat.optimizers_of(innermost(unbuilt[0]))
            optimizers = [
                *optimizers,
                *(o for o in made if not any(o is each for each in optimizers)),
            ]
        has_changed = bool(unbuilt)
        for optimizer in optimizers:
            if optimizer.built:
                has_changed |= self._registry.send_optimizer(
                    optimizer, self._is_strategy
                )
        return has_changed


def get_current_worker_index() -> int | None:
    """int, the number of the worker that runs this function; None elsewhere.

    Example:

    >>> coordinator.schedule(ks.get_current_worker_index).fetch()
    """
    index: int | None = getattr(context.current_strategy(), "worker_index", None)
    return index


# Names of `tf.distribute.coordinator`.
PerWorkerValue = PerWorkerValues
experimental_get_current_worker_index = get_current_worker_index


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _with_references(structure: Any) -> Any:
    if isinstance(structure, PerWorkerValues):
        return structure.reference
    if isinstance(structure, RemoteValue):
        return structure.fetch()
    if type(structure) in (list, tuple):
        return type(structure)(_with_references(item) for item in structure)
    if type(structure) is dict:
        return {key: _with_references(item) for key, item in structure.items()}
    if keras.ops.is_tensor(structure):
        return keras.ops.convert_to_numpy(structure)
    return structure


def _to_tensor(value: Any) -> Any:
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return keras.ops.convert_to_tensor(value)
    return value
