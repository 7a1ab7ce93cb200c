"""An engine on Keras's NumPy backend: the recipe of the package's README, in full.

Replicas are threads of which one runs at a time, from one collective to the next. All
virtual CPUs are one memory. NumPy has no gradients: they are finite differences, which
are exact for quadratic losses and whose sum over replicas is that of the summed loss.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import Any

import keras
import numpy as np

from harness.numpy_replicas import NumpyPrimitives
from keras_strategies import context, engines
from keras_strategies.devices import Device
from keras_strategies.errors import ReplicaAbortedError, ReplicaMismatchError
from keras_strategies.keras_compat.state_scope import current_policy
from keras_strategies.keras_compat.thread_state import (
    outside_stateless_scopes,
    thread_state,
    with_thread_state,
)
from keras_strategies.keras_compat.variables.seeds import seed_offset
from keras_strategies.keras_compat.variables.values import raw_value
from keras_strategies.runtime.communicator import Communicator
from keras_strategies.runtime.drivers import Drivers, FitDriver, RunDriver
from keras_strategies.runtime.engine import Engine, Feature, StrategyCore
from keras_strategies.runtime.placement import VariableCopy, nbytes_of
from keras_strategies.runtime.replica_set import ReplicaSet
from keras_strategies.runtime.state import run_state
from keras_strategies.runtime.state.replica_state import ReplicaState
from keras_strategies.runtime.state.run_state import (
    CreatedVariables,
    LocalValues,
    RunState,
)
from keras_strategies.types import ReduceOp
from keras_strategies.values import flatten, map_structure, regroup, select_replica

PRIMITIVES = NumpyPrimitives()
#: Step of finite differences: a power of two, so that small numbers stay exact.
STEP = 2.0**-4


class NumpyEngine(Engine):
    """NumPy arrays on virtual CPUs."""

    name = "numpy"
    lacks = MappingProxyType(
        {
            feature: "Set KERAS_BACKEND=jax."
            for feature in Feature
            if feature is not Feature.SEPARATE_BATCH_NORM
        }
    )

    def __init__(self) -> None:
        self._cpus = 1

    def local_devices(self) -> tuple[Device, ...]:
        return tuple(Device("cpu", i) for i in range(self._cpus))

    def set_virtual_cpu_devices(self, count: int) -> None:
        self._cpus = count

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

            gradients = [_finite_differences(loss_of, v) for v in variables]
            return fn(*args, **kwargs), gradients

        return wrapped

    def function(
        self, fn: Callable[..., Any], jit_compile: bool | None
    ) -> Callable[..., Any]:
        return fn

    def drivers(self, strategy: StrategyCore) -> Drivers:
        return Drivers(NumpyFit(strategy.placement), NumpyRun(strategy))


def _finite_differences(loss_of: Callable[[], Any], variable: Any) -> Any:
    """The gradient of the replicas' summed losses; None if no loss reads the variable.

    In replica context all replicas take the same steps, and each of them moves its
    copy in turn.
    """
    outer, replica = current_policy(), context.current_replica()
    count = 1 if replica is None else replica.num_replicas_in_sync
    own = 0 if replica is None else replica.replica_id_in_sync_group

    def value_of(read: Any) -> Any:
        value = None if outer is None else outer.read(read)
        return raw_value(read) if value is None else value

    value = np.asarray(value_of(variable))
    gradient = np.zeros_like(value)
    is_read = False

    def total(moved: Any) -> Any:
        """The summed loss, without other effects than those of Python."""
        nonlocal is_read
        state = ReplicaState(lambda v: moved if v is variable else value_of(v))
        with state.scope():
            loss = loss_of()
        is_read |= id(variable) in state.reads
        return loss if replica is None else replica.all_reduce("SUM", loss)

    for mover in range(count):
        for index in np.ndindex(value.shape):
            step = np.zeros_like(value)
            step[index] = STEP if mover == own else 0
            slope = (total(value + step) - total(value - step)) / (2 * STEP)
            if mover == own:
                gradient[index] = slope
    return gradient if is_read else None


class NumpyFit(FitDriver):
    """Keras's own functions, on one device."""

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def step_function(
        self, model: Any, kind: str, make: Callable[[bool], Any], force: bool
    ) -> None:
        make(force)

    def copies(self, variable: Any) -> list[VariableCopy]:
        value = raw_value(variable)
        return [VariableCopy("cpu:0", nbytes_of(variable), "variable", value)]


class NumpyRun(RunDriver):
    """Runs functions on the replicas of one strategy."""

    def __init__(self, strategy: StrategyCore):
        self.strategy = strategy
        self.count = len(strategy.placement.replicas)
        self.replica_set = ReplicaSet.local(PRIMITIVES, self.count)
        self.on_read_values = NumpyLocalValues(self.count)

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[tuple[Any, ...]],
        kwargs: Sequence[dict[str, Any]],
    ) -> list[Any]:
        communicator = TurnCommunicator(self)
        made = CreatedVariables()
        for i in range(self.count):
            replica = context.ReplicaContext(self.strategy, i, communicator)
            state = RunState(replica, self._copier(i), self.on_read_values.get, made)
            communicator.states.append(state)
        around = thread_state()

        def on_replica(i: int) -> Any:
            state = communicator.states[i]
            with (
                communicator.turns(i),
                with_thread_state(around),
                context.on_replica(state.replica),
                state.scope(),
            ):
                return fn(*args[i], **kwargs[i])

        with ThreadPoolExecutor(self.count) as pool:
            calls = [pool.submit(on_replica, i) for i in range(self.count)]
        if communicator.error is not None:
            raise communicator.error
        self.commit(communicator.states)
        return [call.result() for call in calls]

    def _copier(self, replica_id: int) -> Callable[[Any], Any]:
        def copy(variable: Any) -> Any:
            offset = seed_offset(variable, replica_id)
            raw = raw_value(variable)
            return raw + np.array([offset, 0], raw.dtype) if offset else raw

        return copy

    def commit(self, states: Sequence[RunState]) -> None:
        """Assigns the replicas' values to variables."""
        updated = {k: v for state in states for k, (v, _) in state.updates.items()}
        for key, variable in updated.items():
            if run_state.is_local(variable):
                values = [state.read(variable) for state in states]
                self.on_read_values.commit(variable, values)
            else:
                having = [s.updates[key][1] for s in states if key in s.updates]
                variable.assign(run_state.merged(variable, having))
            for state in states:
                state.forget([variable])

    def apply_gradients(
        self,
        apply: Callable[[Sequence[Any], Sequence[Any] | None], Any],
        gradients: Sequence[Any],
        variables: Sequence[Any] | None,
        aggregate: bool,
    ) -> None:
        def update(strategy: StrategyCore, gradients: Sequence[Any]) -> None:
            columns = [
                [select_replica(i, gradient) for i in range(self.count)]
                for gradient in gradients
            ]
            present = [[part for part in c if part is not None] for c in columns]
            sums = [PRIMITIVES.reduce(ReduceOp.SUM, c) if c else None for c in present]
            apply(sums if aggregate else [c[0] for c in columns], variables)

        replica = context.current_replica()
        assert replica is not None
        replica.merge_call(update, args=(list(gradients),))

    def local_values(self, variable: Any) -> Sequence[Any]:
        return [self.on_read_values.get(variable, i) for i in range(self.count)]

    def variable_assigned(self, variable: Any, value: Any) -> None:
        self.on_read_values.assigned(variable, value)

    def creating_variable(self) -> contextlib.AbstractContextManager[Any]:
        outside: contextlib.AbstractContextManager[Any]
        outside = outside_stateless_scopes()
        return outside


class NumpyLocalValues(LocalValues):
    """On-read values: an array for each replica."""

    def __init__(self, count: int):
        self._count = count
        self._values: dict[int, list[Any]] = {}

    def get(self, variable: Any, replica_id: int) -> Any:
        if id(variable) not in self._values:
            weakref.finalize(variable, self._values.pop, id(variable), None)
            self.assigned(variable, raw_value(variable))
        return self._values[id(variable)][replica_id]

    def commit(self, variable: Any, values: Sequence[Any]) -> None:
        value = run_state.cross_replica_value(variable, values)
        variable.assign(value)
        self._values[id(variable)] = list(values)

    def assigned(self, variable: Any, value: Any) -> None:
        value = keras.ops.convert_to_tensor(value, variable.dtype)
        self._values[id(variable)] = run_state.parts(variable, value, self._count)


class TurnCommunicator(Communicator):
    """Collectives of threads that take turns: each runs to its next collective."""

    def __init__(self, run: NumpyRun):
        self._run = run
        self.states: list[RunState] = []
        self.error: BaseException | None = None
        self._condition = threading.Condition()
        self._turn = 0
        self._going = set(range(run.count))
        self._waiting: dict[int, tuple[str, Any]] = {}
        self._results: list[Any] = []

    @contextlib.contextmanager
    def turns(self, replica_id: int) -> Iterator[None]:
        """Runs a block in the turns of one replica; the first error ends the others."""
        try:
            self._await_turn(replica_id)
            yield
        except BaseException as error:
            self.error = self.error or error
        finally:
            with self._condition:
                self._going.discard(replica_id)
                self._pass_turn(replica_id)

    def _await_turn(self, replica_id: int) -> None:
        with self._condition:
            self._condition.wait_for(lambda: self.error or self._turn == replica_id)
        if self.error is not None:
            raise ReplicaAbortedError("Stopped: another replica failed.")

    def _pass_turn(self, replica_id: int) -> None:
        after = (replica_id + i for i in range(1, self._run.count + 1))
        going = [
            i % self._run.count for i in after if i % self._run.count in self._going
        ]
        self._turn = going[0] if going else -1
        self._condition.notify_all()

    def _exchange(
        self, replica_id: int, kind: str, value: Any, combine: Callable[[Any], Any]
    ) -> Any:
        """The replica's part of what `combine` makes of all replicas' values."""
        self._waiting[replica_id] = (kind, value)
        if len(self._waiting) == self._run.count:
            kinds, values = zip(*(self._waiting[i] for i in self._order()), strict=True)
            if len(set(kinds)) > 1:
                raise ReplicaMismatchError(f"Replicas called {kinds} at once.")
            self._results = combine(values)
            self._waiting.clear()
        with self._condition:
            self._pass_turn(replica_id)
        self._await_turn(replica_id)
        if replica_id in self._waiting:
            raise ReplicaMismatchError(f"Not all replicas called `{kind}`.")
        return self._results[replica_id]

    def _order(self) -> range:
        return range(self._run.count)

    def all_reduce(self, replica_id: int, op: ReduceOp, value: Any) -> Any:
        def combine(values: Sequence[Any]) -> list[Any]:
            return self._run.replica_set.reduce(op, values)

        return self._collective(replica_id, "all_reduce", value, combine)

    def all_gather(self, replica_id: int, value: Any, axis: int) -> Any:
        def combine(values: Sequence[Any]) -> list[Any]:
            return self._run.replica_set.gather(values, axis)[0]

        return self._collective(replica_id, "all_gather", value, combine)

    def _collective(
        self, replica_id: int, kind: str, value: Any, combine: Callable[..., Any]
    ) -> Any:
        tensors = [keras.ops.convert_to_tensor(leaf) for leaf in flatten(value)]
        found = iter(
            self._exchange(
                replica_id,
                kind,
                tensors,
                lambda values: [combine(values)] * self._run.count,
            )
        )
        return map_structure(lambda _: next(found), value)

    def merge_call(
        self,
        replica_id: int,
        merge_fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        def merged(values: Sequence[Any]) -> list[Any]:
            args, kwargs = regroup([list(value) for value in values])
            strategy = self._run.strategy
            with (
                outside_stateless_scopes(),
                context.merged_replicas(strategy),
            ):
                self._run.commit(self.states)
                result = merge_fn(strategy, *args, **kwargs)
            for state in self.states:
                state.forget(state.variables_read())
            return [select_replica(i, result) for i in self._order()]

        return self._exchange(replica_id, "merge_call", (list(args), kwargs), merged)


def install() -> None:
    """Names the engine, as `engines/__init__.py` names the others."""
    engines.ENGINES.setdefault("numpy", f"{__name__}:NumpyEngine")
