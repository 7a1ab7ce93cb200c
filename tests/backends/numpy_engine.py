"""An engine on Keras's NumPy backend: the recipe of the package's README.

Replicas are threads of which one runs at a time, from one collective to the next. All
virtual CPUs are one memory. `numpy_gradients.py` has what NumPy lacks of a framework.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import keras
import numpy as np
from backends.numpy_gradients import finite_differences
from backends.numpy_replicas import NumpyPrimitives

from keras_strategies.devices import Device
from keras_strategies.errors import ReplicaAbortedError, ReplicaMismatchError
from keras_strategies.keras_compat import thread_state
from keras_strategies.keras_compat.variables.generator_seeds import is_seed_state
from keras_strategies.keras_compat.variables.values import raw_value
from keras_strategies.runtime.drivers import Drivers, FitDriver
from keras_strategies.runtime.engine import Engine, Feature, StrategyCore
from keras_strategies.runtime.placement import VariableCopy, nbytes_of
from keras_strategies.runtime.replicas.collectives import (
    MergeArguments,
    ReplicaCollectives,
    call_merged,
)
from keras_strategies.runtime.replicas.replica_run import MergeContext, ReplicaRun
from keras_strategies.runtime.state.local_values import TensorStorage
from keras_strategies.runtime.state.run_state import CreatedVariables
from keras_strategies.types import ReduceOp

PRIMITIVES = NumpyPrimitives()


class NumpyEngine(Engine):
    """NumPy arrays on virtual CPUs."""

    name = "numpy"
    lacks = dict.fromkeys(set(Feature) - {Feature.SEPARATE_BATCH_NORM}, "Use JAX.")
    cpus = 1

    def local_devices(self) -> tuple[Device, ...]:
        return tuple(Device("cpu", i) for i in range(self.cpus))

    def set_virtual_cpu_devices(self, count: int) -> None:
        self.cpus = count

    def to_device(self, value: Any, device: Device) -> Any:
        return keras.ops.convert_to_tensor(value)

    def device_of(self, tensor: Any) -> Device:
        return Device("cpu", 0)

    def on_device(self, device: Device) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def all_reduce(self, op: ReduceOp, tensors: Sequence[Any]) -> list[Any]:
        return [PRIMITIVES.reduce(op, tensors)] * len(tensors)

    def value_and_grad(
        self, fn: Callable[..., Any], variables: Sequence[Any], has_aux: bool
    ) -> Callable[..., Any]:
        @functools.wraps(fn)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            def loss_of() -> Any:
                result = fn(*args, **kwargs)
                return result[0] if has_aux else result

            gradients = [finite_differences(loss_of, v) for v in variables]
            return fn(*args, **kwargs), gradients

        return wrapped

    def function(self, fn: Any, jit_compile: bool | None) -> Any:
        return fn

    def drivers(self, strategy: StrategyCore) -> Drivers:
        return Drivers(NumpyFit(strategy.placement), NumpyRun(strategy))


class NumpyFit(FitDriver):
    """Keras's own functions, on one device. Keras has no `fit` on NumPy."""

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def step_function(self, model: Any, kind: str, make: Callable[[], Any]) -> None:
        make()

    def copies(self, variable: Any) -> list[VariableCopy]:
        value = raw_value(variable)
        return [VariableCopy("cpu:0", nbytes_of(variable), "variable", value)]


class NumpyRun(ReplicaRun):
    """Runs functions on the replicas of one strategy."""

    def __init__(self, strategy: StrategyCore):
        super().__init__(strategy, PRIMITIVES, TensorStorage())
        self.replicas = range(len(strategy.placement.replicas))

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[tuple[Any, ...]],
        kwargs: Sequence[dict[str, Any]],
    ) -> list[Any]:
        merging = MergeContext(self)
        made = CreatedVariables()
        collectives = TurnCollectives(self, merging)
        rows = self.rows_of(args, kwargs)
        tasks = self.tasks(fn, args, kwargs, rows, collectives, merging, made)
        around = thread_state.thread_state()

        def on_thread(i: int) -> Any:
            with collectives.turns(i), thread_state.with_thread_state(around):
                return tasks[i]()

        with ThreadPoolExecutor(len(tasks)) as pool:
            calls = [pool.submit(on_thread, i) for i in self.replicas]
        if collectives.error is not None:
            raise collectives.error
        self.commit(merging)
        return [call.result() for call in calls]

    def copier(self, replica_id: int) -> Callable[[Any], Any]:
        def copy(variable: Any) -> Any:
            # NumPy draws no numbers of rows: seeds differ, so that replicas draw apart.
            value = raw_value(variable)
            if is_seed_state(variable):
                value = np.array(value)
                value[0] += np.uint32(replica_id << 20)
            return value

        return copy

    def creating_variable(self) -> Any:
        return thread_state.outside_stateless_scopes()


class TurnCollectives(ReplicaCollectives):
    """Collectives of threads that take turns: each runs to its next collective."""

    def __init__(self, run: NumpyRun, merging: MergeContext):
        self._run = run
        self._merging = merging
        self.error: BaseException | None = None
        self._condition = threading.Condition()
        self._order = list(run.replicas)  # Replicas that run; the first has its turn.
        self._given: dict[int, tuple[str, Any]] = {}
        self._results: Sequence[Any] = ()

    @contextlib.contextmanager
    def turns(self, replica_id: int) -> Iterator[None]:
        """Runs a block in the turns of one replica; the first error ends the others."""
        try:
            self._await_turn(replica_id)
            yield
        except BaseException as error:
            self.error = self.error or error
            raise
        finally:
            with self._condition:
                self._order.remove(replica_id)
                self._condition.notify_all()

    def _await_turn(self, replica_id: int) -> None:
        with self._condition:
            self._condition.wait_for(lambda: self.error or self._order[0] == replica_id)
        if self.error is not None:
            raise ReplicaAbortedError("Another replica failed.")

    def _exchange(
        self, replica_id: int, kind: str, value: Any, combine: Callable[[Any], Any]
    ) -> Any:
        """The replica's part of what `combine` makes of all replicas' values."""
        self._given[replica_id] = kind, value
        if len(self._given) == len(self._run.replicas):
            kinds, values = zip(*map(self._given.get, self._run.replicas), strict=True)
            if len(set(kinds)) > 1:
                raise ReplicaMismatchError(f"Replicas called {kinds} at once.")
            self._results = combine(values)
            self._given.clear()
        with self._condition:
            self._order.append(self._order.pop(0))
            self._condition.notify_all()
        self._await_turn(replica_id)
        if replica_id in self._given:
            raise ReplicaMismatchError(f"Not all replicas called `{kind}`.")
        return self._results[replica_id]

    def all_reduce(self, replica: int, op: ReduceOp, tensors: Sequence[Any]) -> Any:
        def reduce(values: Any) -> list[Any]:
            return [self._run.replica_set.reduce(op, values)] * len(values)

        return self._exchange(replica, "all_reduce", tensors, reduce)

    def all_gather(
        self, replica: int, tensors: Any, axis: int, are_equal: bool = False
    ) -> Any:
        def gather(values: Any) -> list[Any]:
            return [self._run.replica_set.gather(values, axis)[0]] * len(values)

        return self._exchange(replica, "all_gather", tensors, gather)

    def merge_call(
        self, replica: int, merge: Callable[..., Any], arguments: MergeArguments
    ) -> Any:
        def merged(values: Any) -> list[Any]:
            with self._merging():
                return call_merged(merge, values)

        return self._exchange(replica, "merge_call", arguments, merged)
