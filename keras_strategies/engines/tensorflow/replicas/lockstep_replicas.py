"""Replicas run by `tf.distribute`, and the collectives between them.

`tf.distribute.MirroredStrategy.run` starts a thread for each replica, which builds its
part of the graph, or runs eagerly, on its own device. One thread runs at a time, until
it ends or reaches a `merge_call`, so the program is always traced in the same order.
The parts run in parallel when the graph runs.

`tf.distribute` is used for nothing else: Keras runs under its default strategy.

# State of a thread

- Graph, name scope, control dependencies, variable creators, device policy, eager
  context and summaries: the caller's, by `tf.distribute`.
- Device: the replica's, by `tf.distribute`.
- Python's context variables: a copy of the caller's, since those of NumPy and of users
  act in a layer.
- Keras's scopes: the caller's.
- State of the process (seed of the graph, soft placement, threads, TF32): shared, since
  one thread runs at a time and the parts are one program.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_strategies.devices import Device
from keras_strategies.engines.tensorflow.data_parallel.custom_gradient import (
    custom_gradient,
)
from keras_strategies.engines.tensorflow.devices import tf_device
from keras_strategies.engines.tensorflow.tensor_primitives import PRIMITIVES
from keras_strategies.errors import (
    GatherError,
    MixedStrategyError,
    ReplicaError,
    ReplicaMismatchError,
)
from keras_strategies.keras_compat.thread_state import thread_state, with_thread_state
from keras_strategies.runtime.replicas.collectives import (
    MergeArguments,
    ReplicaCollectives,
    call_merged,
)
from keras_strategies.runtime.replicas.replica_set import ReplicaSet
from keras_strategies.types import ReduceOp

#: Computes the results of all replicas from their values, in replica order.
Combine = Callable[[list[Any]], Sequence[Any]]
#: Computes the results of all replicas from the values of replica 0 and a `Combine`;
#: None if the other replicas are not copies of replica 0.
CopiedExchange = Callable[[Sequence[Any], Combine], list[Any] | None]


class NestedCollectiveError(ReplicaError):
    """A collective was called inside a loop or branch of the graph."""


class _Replicas(tf.distribute.MirroredStrategy):
    """The strategy of TensorFlow whose `run` starts the threads."""


def check_no_other_strategy() -> None:
    """Raises in the scope of a strategy of `tf.distribute` that the user has made."""
    other = tf.distribute.get_strategy()
    if tf.distribute.has_strategy() and not isinstance(other, _Replicas):
        raise MixedStrategyError(
            f"Mixing different strategies: this is the scope of {type(other).__name__} "
            "of `tf.distribute`, which would place variables and split batches too. "
            "Leave it; the strategies of `keras_strategies` replace those of "
            "`tf.distribute`."
        )


class ReplicaEngine:
    """Runs tasks on replicas.

    Args:
        devices: the device of each replica.
    """

    def __init__(self, devices: Sequence[Device]):
        _suppress_messages()
        self._devices = tuple(devices)
        self._strategies: dict[int, tf.distribute.Strategy] = {}

    def run(
        self, tasks: Sequence[Callable[[], Any]], collectives: LockstepCollectives
    ) -> list[Any]:
        """Runs one task on each of the first replicas; returns the results in order.

        An exception in one replica stops the others and is raised.
        """
        results: dict[int, Any] = {}
        state, variables = thread_state(), contextvars.copy_context()

        def replica() -> None:
            replica_id = _replica_id()
            with with_thread_state(state):
                # A context is entered by one thread at a time.
                results[replica_id] = variables.copy().run(tasks[replica_id])
            if len(results) == len(tasks):
                _end_without_polling()

        collectives.begin()
        try:
            self._strategy(len(tasks)).run(replica)
        except RuntimeError as error:
            if "different number of replica_context().merge_call()" in str(error):
                raise ReplicaMismatchError(
                    "A replica ended while other replicas waited for it in a "
                    "collective. All replicas must make the same collective calls in "
                    "the same order; check for a branch on the replica or on its data."
                ) from error
            raise
        return [results[replica_id] for replica_id in range(len(tasks))]

    def _strategy(self, count: int) -> tf.distribute.Strategy:
        if count not in self._strategies:
            # After an exception in a replica, CPU collectives would remain aborted;
            # this reduction does not use them.
            self._strategies[count] = _Replicas(
                [tf_device(device) for device in self._devices[:count]],
                cross_device_ops=tf.distribute.ReductionToOneDevice(),
            )
        return self._strategies[count]


def _replica_id() -> int:
    replica_id = tf.distribute.get_replica_context().replica_id_in_sync_group
    return int(tf.get_static_value(replica_id))


def _end_without_polling() -> None:
    """Called in the thread of the last replica: `tf.distribute` joins at once.

    It looks whether threads live, and where the last is still ending (on Python 3.13
    most of the time) looks again after one second, unless its coordinator has stopped.
    """
    coordinator = getattr(threading.current_thread(), "coord", None)
    if coordinator is not None:
        coordinator.request_stop()


def _suppress_messages() -> None:
    """Suppresses what TensorFlow logs of its strategies, such as how to run them."""
    logger = tf.get_logger()
    if _is_of_others not in logger.filters:
        logger.addFilter(_is_of_others)


def _is_of_others(record: logging.LogRecord) -> bool:
    text = str(record.msg)
    return "MirroredStrategy" not in text and "eagerly has significant" not in text


class LockstepCollectives(ReplicaCollectives):
    """Collectives between the replicas of one run.

    Args:
        devices: the device of each participating replica.
        lead: the device on which values are combined.
        replica_set: the replicas of all workers; None for those of one process.
        merging: returns a context manager for functions of `merge_call`.
        copied_exchange: called in collectives of replica 0; None if no replica is a
            copy of another.
    """

    custom_gradient = staticmethod(custom_gradient)

    def __init__(
        self,
        devices: Sequence[Device],
        lead: Device,
        replica_set: ReplicaSet | None = None,
        merging: Callable[
            [], contextlib.AbstractContextManager[None]
        ] = contextlib.nullcontext,
        copied_exchange: CopiedExchange | None = None,
    ):
        self._merging = merging
        self.replica_set = replica_set or ReplicaSet.local(PRIMITIVES, len(devices))
        self.first = self.replica_set.counts.first
        self._devices = [tf_device(device) for device in devices]
        self._lead = tf_device(lead)
        # Its collectives of tensors return their arguments, also in loops and branches.
        self._is_alone = len(devices) == 1 and self.replica_set.workers is None
        self._arrived: list[Any] = [None] * len(devices)
        self._results: list[Any] = [None] * len(devices)
        self._graph: Any = None
        self._copied_exchange = copied_exchange
        self.begin()

    def begin(self) -> None:
        """Starts a forward or backward pass in the current graph."""
        self._graph = _current_graph()
        # Kinds and results of collectives completed by replica 0 for all its copies.
        self._copied: list[tuple[str, list[Any]]] = []
        self._calls = [0] * len(self._devices)

    def was_used_by(self, replica_id: int) -> bool:
        """Whether a replica has exchanged values with other traced replicas.

        Collectives that replica 0 completed for its copies do not count.
        """
        made = len(self._copied) if replica_id == 0 else 0
        return self._calls[replica_id] > made

    def exchange(
        self,
        replica_id: int,
        kind: str,
        value: Any,
        combine: Combine,
        is_of_tensors: bool = True,
    ) -> Any:
        """Exchanges values with the other replicas.

        Args:
            replica_id: int, the number of the calling replica.
            kind: str, the collective, for messages.
            value: the value of this replica.
            combine: called once, with the values of all replicas in replica order: in
                the thread that started the replicas, or in replica 0's if the others
                are copies.
            is_of_tensors: bool, whether the value is a list of tensors.
        """
        if _current_graph() is not self._graph:
            raise NestedCollectiveError(
                f"`{kind}` was called in a loop, a branch or a `tf.function` inside "
                "the replica function, where TensorFlow does not support collectives "
                "between replicas. Call it outside of the loop, branch or function."
            )
        call = self._calls[replica_id]
        self._calls[replica_id] += 1
        if call < len(self._copied):
            # Replica 0 completed it, expecting this replica to be a copy.
            expected, results = self._copied[call]
            _check_kinds([expected, kind])
            return results[replica_id]
        if (
            replica_id == 0
            and is_of_tensors
            and call == len(self._copied)
            and self._copied_exchange is not None
        ):
            own = functools.partial(self._combined, combine)
            found = self._copied_exchange(value, own)
            if found is not None:
                self._copied.append((kind, found))
                return found[0]
        self._arrived[replica_id] = (kind, value)

        def exchange(_: Any) -> None:
            _check_kinds([kind for kind, _ in self._arrived])
            self._results = self._combined(combine, [v for _, v in self._arrived])

        tf.distribute.get_replica_context().merge_call(exchange)
        result, self._results[replica_id] = self._results[replica_id], None
        return result

    def _combined(self, combine: Combine, values: list[Any]) -> list[Any]:
        with tf.device(self._lead):
            return list(combine(values))

    def _here(self, replica_id: int, tensor: Any) -> Any:
        # Collectives define their own gradients; their operations have none.
        with tf.device(self._devices[replica_id]):
            return tf.stop_gradient(tensor)

    # Collectives.

    def all_reduce(
        self, replica: int, op: ReduceOp, tensors: Sequence[Any]
    ) -> Sequence[Any]:
        if self._is_alone:
            return [tf.convert_to_tensor(tensor) for tensor in tensors]
        count = len(self._devices)

        def reduce(tensors: Sequence[Any]) -> list[Any]:
            def combine(values: list[Any]) -> list[Any]:
                return [self.replica_set.reduce(op, values)] * count

            found = self.exchange(replica, f"all_reduce {op.name}", tensors, combine)
            return [self._here(replica, tensor) for tensor in found]

        @custom_gradient
        def reduced(*tensors: Any) -> Any:
            def grad(*gradients: Any) -> list[Any]:
                if op not in (ReduceOp.SUM, ReduceOp.MEAN):
                    raise GatherError(
                        f"`all_reduce` with {op.name} has no gradient. Use SUM or "
                        "MEAN, or stop the gradient of its argument."
                    )
                return reduce(gradients)

            return reduce(tensors), grad

        return list(reduced(*tensors))

    def all_gather(
        self, replica: int, tensors: Sequence[Any], axis: int, are_equal: bool = False
    ) -> Sequence[Any]:
        if self._is_alone:
            return [tf.convert_to_tensor(tensor) for tensor in tensors]
        count = len(self._devices)

        def gather(values: list[Any]) -> list[Any]:
            return [self.replica_set.gather(values, axis, are_equal)] * count

        @custom_gradient
        def gathered(*tensors: Any) -> Any:
            found, lengths = self.exchange(replica, "all_gather", tensors, gather)

            def scatter(values: list[Any]) -> list[Any]:
                totals = self.replica_set.reduce(ReduceOp.SUM, values)
                parts = [
                    tf.split(total, sizes, axis)[self.first : self.first + count]
                    for total, sizes in zip(totals, lengths, strict=True)
                ]
                return [list(own) for own in zip(*parts, strict=True)]

            def grad(*gradients: Any) -> list[Any]:
                own = self.exchange(
                    replica, "gradient of all_gather", gradients, scatter
                )
                return [self._here(replica, part) for part in own]

            return [self._here(replica, tensor) for tensor in found], grad

        return list(gathered(*tensors))

    def merge_call(
        self, replica: int, merge: Callable[..., Any], arguments: MergeArguments
    ) -> Any:
        if tf.executing_eagerly() and self._graph is not None:
            return self._merge_call_in_init_scope(replica, merge, arguments)

        def merged(arguments: list[MergeArguments]) -> list[Any]:
            with self._merging():
                return call_merged(merge, arguments)

        return self.exchange(replica, "merge_call", arguments, merged, False)

    def _merge_call_in_init_scope(
        self, replica: int, merge: Callable[..., Any], arguments: MergeArguments
    ) -> Any:
        """Calls a merged function eagerly, while the program is traced.

        The replicas meet in the graph; the function is outside of it again.
        """

        def lifted(*args: Any, **kwargs: Any) -> Any:
            with tf.init_scope():
                return merge(*args, **kwargs)

        with self._graph.as_default():
            return self.merge_call(replica, lifted, arguments)


def _check_kinds(kinds: Sequence[str]) -> None:
    if len(set(kinds)) > 1:
        raise ReplicaMismatchError(
            "Replicas called different collectives: in replica order, "
            f"{', '.join(kinds)}. All replicas must make the same collective calls in "
            "the same order."
        )


def _current_graph() -> Any:
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
