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

from keras_strategies.engines.tensorflow import compat
from keras_strategies.engines.tensorflow.compiled_function import (
    program_of,
    refuse_xla,
)
from keras_strategies.engines.tensorflow.data_parallel.assigned_values import (
    assigned_value,
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
from keras_strategies.engines.tensorflow.workers.worker_collectives import workers_of
from keras_strategies.keras_compat.models.layer_calls import layer_calls_through
from keras_strategies.keras_compat.thread_state import outside_stateless_scopes
from keras_strategies.keras_compat.variables.seeds import seed_offset
from keras_strategies.keras_compat.variables.values import raw_value
from keras_strategies.runtime.placement import Placement
from keras_strategies.runtime.replicas.replica_run import MergeContext, ReplicaRun
from keras_strategies.runtime.replicas.replica_set import ReplicaSet
from keras_strategies.runtime.state.local_values import LocalValues
from keras_strategies.runtime.state.run_state import (
    CreatedVariables,
)

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

    def __init__(self, replica_set: ReplicaSet, placement: Placement):
        super().__init__(replica_set, placement)
        self._devices = [tf_device(device) for device in placement.replicas]

    def make(self, variable: Any) -> list[tf.Variable]:
        with tf.init_scope():
            parts = self.parts(variable)
        made = []
        for i, (part, device) in enumerate(zip(parts, self._devices, strict=True)):
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

    local_values_class = TensorFlowLocalValues

    def __init__(self, strategy: StrategyCore, engine: ReplicaEngine):
        compat.exclude_from_autograph("keras_strategies")
        _leave_out_warning()
        # Functions that are `tf.function`s themselves, as programs of all replicas.
        self._programs: weakref.WeakKeyDictionary[Any, Any] = (
            weakref.WeakKeyDictionary()
        )
        super().__init__(strategy, PRIMITIVES)
        self._engine = engine
        self._devices = [tf_device(device) for device in self.placement.replicas]
        self.lead = tf_device(self.placement.variables)

    def workers_changed(self) -> None:
        super().workers_changed()
        self._programs.clear()

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
        merging = MergeContext(self)
        collectives = LockstepCollectives(
            self.placement.replicas,
            self.placement.variables,
            self.replica_set,
            self.reduction,
            merging,
        )
        tasks = self.tasks(fn, args, kwargs, collectives, merging, CreatedVariables())
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

    @contextlib.contextmanager
    def creating_variable(self) -> Iterator[None]:
        # The first replica makes what all of them use, before the others have begun.
        with outside_stateless_scopes(), creating_variables(self.lead):
            yield

    def copier(self, replica_id: int) -> Callable[[Any], Any]:
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

    def assigned_value(self, variable: Any, value: Any) -> Any:
        raw = raw_value(variable)
        if raw is None or not raw.trainable or not raw.dtype.is_floating:
            return value
        return assigned_value(raw.read_value(), value)

    @contextlib.contextmanager
    def on_replica(self, replica_id: int) -> Iterator[None]:
        device = self._devices[replica_id]
        guard = call_with_a_row if "CPU" in device else None
        with reading_copies_on(device), layer_calls_through(guard):
            yield

    def merged(self) -> contextlib.AbstractContextManager[Any]:
        return compat.default_strategy()

    def updating(self) -> contextlib.AbstractContextManager[Any]:
        return tf.device(self.lead)
