"""`Strategy.run` on TensorFlow.

The replicas are those of `replicas.py`, eagerly and inside `tf.function`. Variables
stay what they are everywhere else; of mirrored ones, a replica reads its copy:

- trainable ones are read themselves, so that a `tf.GradientTape` in the function
  sees them, and are replaced only on a replica that has assigned them;
- the value of all others is kept from the first read on;
- on-read ones have a variable for each replica.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from keras_strategies import context
from keras_strategies.collectives.replica_ops import LocalReduction
from keras_strategies.engines.tensorflow import compat
from keras_strategies.engines.tensorflow.compiled_function import (
    program_of,
    refuse_xla,
)
from keras_strategies.engines.tensorflow.data_parallel.assigned_values import (
    assigned_value,
)
from keras_strategies.engines.tensorflow.data_parallel.gradient_sums import (
    in_dtype_of,
    sums_of,
    sums_over_workers,
)
from keras_strategies.engines.tensorflow.devices import tf_device
from keras_strategies.engines.tensorflow.replicas.empty_replicas import call_with_a_row
from keras_strategies.engines.tensorflow.replicas.lockstep_replicas import (
    LockstepCollectives,
    ReplicaEngine,
)
from keras_strategies.engines.tensorflow.replicas.mirrored_variables import (
    reading_copies_on,
)
from keras_strategies.engines.tensorflow.tensor_primitives import PRIMITIVES
from keras_strategies.engines.tensorflow.worker_collectives import workers_of
from keras_strategies.keras_compat.models.layer_calls import layer_calls_through
from keras_strategies.keras_compat.thread_state import outside_stateless_scopes
from keras_strategies.keras_compat.variables.seeds import seed_offset
from keras_strategies.keras_compat.variables.values import raw_value
from keras_strategies.runtime.drivers import RunDriver
from keras_strategies.runtime.replicas.replica_set import ReplicaSet
from keras_strategies.runtime.state import run_state
from keras_strategies.runtime.state.run_state import (
    CreatedVariables,
    LocalValues,
    RunState,
)
from keras_strategies.values import DistributedValues, select_replica

if TYPE_CHECKING:
    from keras_strategies.runtime.engine import StrategyCore


@contextlib.contextmanager
def creating_variables(device: str) -> Iterator[None]:
    """Variables made inside are plain and outlive the program that is being traced."""
    with tf.init_scope(), compat.default_strategy(), tf.device(device):
        yield


def _leave_out_warning() -> None:
    """Drops TensorFlow's advice to run its strategies in a `tf.function`."""
    logger = tf.get_logger()
    if _is_no_advice not in logger.filters:
        logger.addFilter(_is_no_advice)


def _is_no_advice(record: logging.LogRecord) -> bool:
    return "eagerly has significant overhead" not in str(record.msg)


class TensorFlowLocalValues(LocalValues):
    """On-read values: a `tf.Variable` for each replica, on its device."""

    def __init__(self, devices: Sequence[str], replica_set: ReplicaSet):
        self._devices = tuple(devices)
        self._replica_set = replica_set
        # By the id of the Keras variable, for as long as that lives.
        self._variables: dict[int, list[tf.Variable]] = {}

    def _all(self, variable: Any) -> list[tf.Variable]:
        key = id(variable)
        if key not in self._variables:
            self._variables[key] = self._make(variable)
            weakref.finalize(variable, self._variables.pop, key, None)
        return self._variables[key]

    def _make(self, variable: Any) -> list[tf.Variable]:
        raw = raw_value(variable)
        with tf.init_scope():
            parts = self._parts(variable, raw.read_value())
        made = []
        for i, (part, device) in enumerate(zip(parts, self._devices, strict=True)):
            with creating_variables(device):
                name = f"{variable.name}_replica_{i}"
                made.append(tf.Variable(part, trainable=False, name=name))
        return made

    def _parts(self, variable: Any, value: Any) -> list[Any]:
        first = self._replica_set.first
        parts = run_state.parts(variable, value, self._replica_set.total)
        return parts[first : first + len(self._devices)]

    def get(self, variable: Any, replica_id: int) -> Any:
        own = self._all(variable)[replica_id - self._replica_set.first]
        with tf.device(own.device):
            return own.read_value()

    def commit(self, variable: Any, values: Sequence[Any]) -> None:
        for own, value in zip(self._all(variable), values, strict=True):
            own.assign(value)
        raw = raw_value(variable)
        with tf.device(raw.device):
            [everywhere] = self._replica_set.all_values([values])
            raw.assign(run_state.cross_replica_value(variable, everywhere))

    def assigned(self, variable: Any, value: Any) -> None:
        if id(variable) not in self._variables:
            return
        whole = tf.cast(value, raw_value(variable).dtype)
        parts = self._parts(variable, whole)
        for own, part in zip(self._variables[id(variable)], parts, strict=True):
            own.assign(part)


class TensorFlowRun(RunDriver):
    """Runs functions on the replicas of one strategy."""

    def __init__(self, strategy: StrategyCore, engine: ReplicaEngine):
        compat.exclude_from_autograph("keras_strategies")
        _leave_out_warning()
        self.strategy = strategy
        self.placement = strategy.placement
        self._engine = engine
        self._devices = [tf_device(device) for device in self.placement.replicas]
        self.lead = tf_device(self.placement.variables)
        workers, share = workers_of(self.placement), self.placement.share
        counts = (share.count,) if workers is None else workers.replicas
        self.replica_set = ReplicaSet(PRIMITIVES, workers, counts, share.first)
        self.reduction = LocalReduction.of(strategy)
        self.on_read_values = TensorFlowLocalValues(self._devices, self.replica_set)
        # Functions that are `tf.function`s themselves, as programs of all replicas.
        self._programs: weakref.WeakKeyDictionary[Any, Any] = (
            weakref.WeakKeyDictionary()
        )

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[tuple[Any, ...]],
        kwargs: Sequence[dict[str, Any]],
    ) -> list[Any]:
        fn = program_of(fn)
        if isinstance(fn, tf.types.experimental.PolymorphicFunction):
            if self.replica_set.total > 1:
                program = self._program(fn)
                with self._watched():
                    return program(list(args), list(kwargs))  # type: ignore[no-any-return]
        elif not tf.executing_eagerly():
            # Python's `if` and `for` on tensors work where they did outside.
            fn = tf.__internal__.autograph.tf_convert(
                fn, tf.__internal__.autograph.control_status_ctx()
            )
        with self._watched():
            return self._run(fn, args, kwargs)

    def _watched(self) -> contextlib.AbstractContextManager[None]:
        """Names the worker that was lost, where a collective fails of it."""
        workers = workers_of(self.placement)
        return contextlib.nullcontext() if workers is None else workers.watched()

    def _program(self, fn: Any) -> Any:
        """A program around all replicas, so that they have collectives.

        `tf.distribute` does the same.
        """
        if fn not in self._programs:
            python_function = fn.python_function

            def program(args: list[Any], kwargs: list[Any]) -> list[Any]:
                return self.run(python_function, args, kwargs)

            # A partial function has no code object, by which retracing is counted.
            own = functools.partial(program)
            self._programs[fn] = tf.function(own, reduce_retracing=True)
        return self._programs[fn]

    def _run(
        self,
        fn: Callable[..., Any],
        args: Sequence[tuple[Any, ...]],
        kwargs: Sequence[dict[str, Any]],
    ) -> list[Any]:
        merging = _MergeContext(self)
        collectives = LockstepCollectives(
            self.placement.replicas,
            self.placement.variables,
            self.replica_set,
            self.reduction,
            merging,
        )
        first = self.replica_set.first
        tasks = []
        made = CreatedVariables()
        for i in range(len(args)):
            replica = context.ReplicaContext(self.strategy, first + i, collectives)
            state = RunState(
                replica, self._copier(i), self.on_read_values.get, made, _assigned
            )
            merging.states.append(state)
            device = self._devices[i]
            tasks.append(_task(fn, args[i], kwargs[i], replica, state, device))
        if self.replica_set.total > 1:
            refuse_xla()
        if len(tasks) == 1:
            collectives.begin()
            with tf.device(self._devices[0]):
                results = [tasks[0]()]
        else:
            results = self._engine.run(tasks, collectives)
        self.commit(merging.states)
        return results

    def apply_gradients(
        self,
        apply: Callable[[Sequence[Any], Sequence[Any] | None], Any],
        gradients: Sequence[Any],
        variables: Sequence[Any] | None,
        aggregate: bool,
    ) -> None:
        replica = context.current_replica()
        assert replica is not None

        def update(strategy: StrategyCore, gradients: Sequence[Any]) -> None:
            if aggregate:
                count = len(self.placement.replicas)
                own = sum_gradients(gradients, count, self.reduction)
                total = sums_over_workers(own, self.placement.workers)
                total = list(map(in_dtype_of, total, gradients))
            else:
                total = [select_replica(0, gradient) for gradient in gradients]
            apply(total, variables)

        replica.merge_call(update, args=(list(gradients),))

    def local_values(self, variable: Any) -> Sequence[Any]:
        first = self.placement.share.first
        replicas = range(len(self.placement.replicas))
        return [self.on_read_values.get(variable, first + i) for i in replicas]

    def variable_assigned(self, variable: Any, value: Any) -> None:
        self.on_read_values.assigned(variable, value)

    @contextlib.contextmanager
    def creating_variable(self) -> Iterator[None]:
        # The first replica makes what all of them use, before the others have begun.
        with outside_stateless_scopes(), creating_variables(self.lead):
            yield

    def _copier(self, replica_id: int) -> Callable[[Any], Any]:
        device = self._devices[replica_id]
        graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()

        def copy(variable: Any) -> Any:
            raw = raw_value(variable)
            if raw is None or raw.trainable:
                # Read as it is, which tapes see. Keras computes regularization losses
                # from the value that the state gives.
                return raw
            # A copy that is first needed in a loop is made before the loop.
            base = graph.as_default() if graph else contextlib.nullcontext()
            with base, tf.device(device):
                value = tf.stop_gradient(raw.read_value())
                offset = seed_offset(variable, self.replica_set.first + replica_id)
                if offset:
                    value += tf.constant([offset, 0], dtype=value.dtype)
                return value

        return copy

    def commit(self, states: Sequence[RunState]) -> None:
        """Gives variables the values that the replicas left, and forgets those."""
        keys = dict.fromkeys(key for state in states for key in state.updates)
        for key in keys:
            having = [state for state in states if key in state.updates]
            variable = having[0].updates[key][0]
            if run_state.is_local(variable):
                self.on_read_values.commit(
                    variable, [state.read(variable) for state in states]
                )
            else:
                values = [state.updates[key][1] for state in having]
                with tf.device(self.lead):
                    if self.replica_set.workers is not None:
                        # All of them, as the other workers' are.
                        own = [
                            state.updates[key][1]
                            if key in state.updates
                            else raw_value(variable).read_value()
                            for state in states
                        ]
                        [values] = self.replica_set.all_values([own])
                    merged = run_state.merged(variable, values)
                    raw_value(variable).assign(merged)
            for state in states:
                state.forget([variable])


def _assigned(variable: Any, value: Any) -> Any:
    raw = raw_value(variable)
    if raw is None or not raw.trainable or not raw.dtype.is_floating:
        return value
    return assigned_value(raw.read_value(), value)


def _task(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    replica: context.ReplicaContext,
    state: RunState,
    device: str,
) -> Callable[[], Any]:
    guard = call_with_a_row if "CPU" in device else None

    def run() -> Any:
        with (
            context.on_replica(replica),
            state.scope(),
            reading_copies_on(device),
            layer_calls_through(guard),
        ):
            return fn(*args, **kwargs)

    return run


class _MergeContext:
    """Context of functions of `merge_call`: they see and change the variables.

    Args:
        run: the run, which assigns the replicas' values.
    """

    def __init__(self, run: TensorFlowRun):
        self._run = run
        self.states: list[RunState] = []

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        with outside_stateless_scopes(), compat.default_strategy():
            self._run.commit(self.states)
            try:
                yield
            finally:
                # Which of them it has assigned, a graph does not say.
                for state in self.states:
                    state.forget(state.variables_read())


def sum_gradients(
    gradients: Sequence[Any], count: int, reduction: LocalReduction | None
) -> list[Any]:
    """Sums each gradient over replicas, on the current device; None adds nothing.

    Args:
        gradients: for each variable a `PerReplica`, or the value of all replicas.
        count: int, the local replicas.
        reduction: the strategy's `CrossDeviceOps`, None for TensorFlow's own sum.
    """
    columns = [
        gradient.values
        if isinstance(gradient, DistributedValues)
        else [gradient] * count
        for gradient in gradients
    ]
    return sums_of(columns, reduction)
