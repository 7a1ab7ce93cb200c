"""`Strategy.run` on TensorFlow.

Replicas run as in `lockstep_replicas.py`, eagerly and inside `tf.function`. A replica
reads variables as follows, mirrored ones from its own copy:

- a trainable variable is read directly, so that a `tf.GradientTape` in the function
  records it, until the replica assigns it;
- the value of another variable is cached at the first read;
- an on-read variable has a `tf.Variable` for each replica.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from keras_strategies.engines.tensorflow.compat.programs import (
    default_strategy,
    exclude_from_autograph,
    is_for_xla,
)
from keras_strategies.engines.tensorflow.compiled_function import (
    program_of,
    refuse_xla,
)
from keras_strategies.engines.tensorflow.data_parallel.assigned_values import (
    assigned_value,
)
from keras_strategies.engines.tensorflow.data_parallel.layer_call_driver import (
    TensorFlowLayerCalls,
)
from keras_strategies.engines.tensorflow.devices import tf_device
from keras_strategies.engines.tensorflow.functions_by_rank import FunctionsByRank
from keras_strategies.engines.tensorflow.random_numbers.intercepted_draws import (
    replica_draws,
)
from keras_strategies.engines.tensorflow.replicas.empty_replicas import (
    padding_empty_replicas,
)
from keras_strategies.engines.tensorflow.replicas.lockstep_replicas import (
    LockstepCollectives,
    ReplicaEngine,
)
from keras_strategies.engines.tensorflow.replicas.replica_reads import reading_on
from keras_strategies.engines.tensorflow.tensor_primitives import PRIMITIVES
from keras_strategies.engines.tensorflow.workers.worker_collectives import workers_of
from keras_strategies.keras_compat.thread_state import outside_stateless_scopes
from keras_strategies.keras_compat.variables.values import raw_value
from keras_strategies.runtime.random_numbers.row_draws import rows_of_arguments
from keras_strategies.runtime.replicas.replica_run import (
    MergeContext,
    ReplicaRun,
    RowsOfRun,
)
from keras_strategies.runtime.replicas.replica_set import ReplicaSet
from keras_strategies.runtime.state.local_values import ValueStorage
from keras_strategies.runtime.state.run_state import (
    CreatedVariables,
)

if TYPE_CHECKING:
    from keras_strategies.runtime.engine import StrategyCore


@contextlib.contextmanager
def creating_variables(device: str) -> Iterator[None]:
    """Context for new variables that are plain and outlive the current trace."""
    with tf.init_scope(), default_strategy(), tf.device(device):
        yield


class VariableStorage(ValueStorage):
    """A `tf.Variable` for each replica, on its device.

    Args:
        devices: the devices, as TensorFlow names them.
    """

    def __init__(self, devices: Sequence[str]):
        self._devices = devices

    def make(self, variable: Any, parts: Callable[[], list[Any]]) -> list[tf.Variable]:
        with tf.init_scope():
            values = parts()
        made = []
        for i, (part, device) in enumerate(zip(values, self._devices, strict=True)):
            with creating_variables(device):
                name = f"{variable.name}_replica_{i}"
                made.append(tf.Variable(part, trainable=False, name=name))
        return made

    def store(self, stored: list[Any], values: Sequence[Any]) -> None:
        for own, value in zip(stored, values, strict=True):
            own.assign(value)

    def load(self, stored: Any) -> Any:
        with tf.device(stored.device):
            return stored.read_value()


class TensorFlowRun(ReplicaRun):
    """Runs functions on the replicas of one strategy."""

    def __init__(self, strategy: StrategyCore, engine: ReplicaEngine):
        exclude_from_autograph("keras_strategies")
        # By `tf.function` passed to `run`, programs of all replicas, and their set.
        self._programs: weakref.WeakKeyDictionary[
            Any, tuple[ReplicaSet, FunctionsByRank]
        ] = weakref.WeakKeyDictionary()
        self._devices = [tf_device(device) for device in strategy.placement.replicas]
        super().__init__(
            strategy,
            PRIMITIVES,
            VariableStorage(self._devices),
            TensorFlowLayerCalls(strategy, engine),
        )
        self._engine = engine
        self.lead = tf_device(self.placement.variables)

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[tuple[Any, ...]],
        kwargs: Sequence[dict[str, Any]],
    ) -> list[Any]:
        fn = program_of(fn)
        if isinstance(fn, tf.types.experimental.PolymorphicFunction):
            given = list(args), list(kwargs)
            program = self._programs_of(fn).of(given)
            with self._watched():
                return program(*given)  # type: ignore[no-any-return]
        with self._watched():
            rows = self._rows_of(args, kwargs)
        if not tf.executing_eagerly():
            # AutoGraph converts `if` and `for` on tensors, as in the code around `run`.
            fn = tf.__internal__.autograph.tf_convert(
                fn, tf.__internal__.autograph.control_status_ctx()
            )
        with self._watched():
            return self._run(fn, args, kwargs, rows)

    def _watched(self) -> contextlib.AbstractContextManager[None]:
        """Raises `WorkerError` if a collective fails because a worker was lost."""
        workers = workers_of(self.placement)
        return contextlib.nullcontext() if workers is None else workers.watched()

    def _programs_of(self, fn: Any) -> FunctionsByRank:
        """The programs of all replicas, in which they can call collectives.

        `tf.distribute` also traces a `tf.function` on its replicas this way.
        """
        replica_set, found = self._programs.get(fn, (None, None))
        if found is None or replica_set is not self.replica_set:
            python_function = fn.python_function

            def program(args: list[Any], kwargs: list[Any]) -> list[Any]:
                return self.run(python_function, args, kwargs)

            found = FunctionsByRank(
                program,
                # XLA compiles programs for one device.
                jit_compile=is_for_xla(fn)
                if self.replica_set.counts.total == 1
                else None,
            )
            self._programs[fn] = self.replica_set, found
        return found

    def _run(
        self,
        fn: Callable[..., Any],
        args: Sequence[tuple[Any, ...]],
        kwargs: Sequence[dict[str, Any]],
        rows: RowsOfRun,
    ) -> list[Any]:
        merging = MergeContext(self)
        collectives = LockstepCollectives(
            self.placement.replicas,
            self.placement.variables,
            self.replica_set,
            merging,
        )
        made = CreatedVariables()
        tasks = self.tasks(fn, args, kwargs, rows, collectives, merging, made)
        if self.replica_set.counts.total > 1:
            refuse_xla()
        if len(tasks) == 1:
            collectives.begin()
            with tf.device(self._devices[0]):
                results = [tasks[0]()]
        else:
            results = self._engine.run(tasks, collectives)
        self.commit(merging)
        return results

    @contextlib.contextmanager
    def creating_variable(self) -> Iterator[None]:
        # The first replica creates shared variables, before the others start.
        with outside_stateless_scopes(), creating_variables(self.lead):
            yield

    def copier(self, replica_id: int) -> Callable[[Any], Any]:
        device = self._devices[replica_id]
        graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()

        def copy(variable: Any) -> Any:
            raw = raw_value(variable)
            if raw is None or raw.trainable:
                # The variable itself, so that tapes record the read. Keras computes
                # regularization losses from this value.
                return raw
            # A copy first read in a loop is made before the loop.
            base = graph.as_default() if graph else contextlib.nullcontext()
            with base, tf.device(device):
                return tf.stop_gradient(raw.read_value())

        return copy

    def assigned_value(self, variable: Any, value: Any) -> Any:
        raw = raw_value(variable)
        if raw is None or not raw.trainable or not raw.dtype.is_floating:
            return value
        return assigned_value(raw.read_value(), value)

    @contextlib.contextmanager
    def on_replica(self, replica_id: int) -> Iterator[None]:
        device = self._devices[replica_id]
        with reading_on(device), padding_empty_replicas("CPU" in device):
            yield

    def knows_rows(self, own: Sequence[Any]) -> bool:
        # Workers trace programs of their own, with other rows.
        is_alone = self.replica_set.workers is None or tf.executing_eagerly()
        return is_alone and all(isinstance(rows, int) for rows in own)

    def _rows_of(
        self, args: Sequence[tuple[Any, ...]], kwargs: Sequence[dict[str, Any]]
    ) -> RowsOfRun:
        """The rows of all replicas, in a run or in a program that is traced.

        Workers trace programs of their own, at other times, so they exchange rows in
        each run of the program, if it draws. All rows are those that were exchanged: a
        worker whose trace knew that it needs none would leave the others waiting.
        """
        if tf.executing_eagerly():
            return self.rows_of(args, kwargs)
        own = rows_of_arguments(list(zip(args, kwargs, strict=True)))
        workers = self.replica_set.workers
        if workers is None or not own:
            return lambda: own
        graph, counts = tf.compat.v1.get_default_graph(), self.replica_set.counts

        @functools.cache
        def rows() -> list[Any]:
            # Draws in a loop need them before the loop.
            with (
                graph.as_default(),
                tf.control_dependencies(None),
                tf.device("CPU:0"),
            ):
                sent = tf.stack([tf.cast(count, tf.int64) for count in own])
                every = workers.gather_rows(sent, counts.by_worker)
                return list(tf.unstack(every, counts.total))

        return rows

    def seeing_draws(self, state: Any) -> contextlib.AbstractContextManager[None]:
        return replica_draws()

    def merged(self) -> contextlib.AbstractContextManager[Any]:
        return default_strategy()

    def updating(self) -> contextlib.AbstractContextManager[Any]:
        return tf.device(self.lead)
