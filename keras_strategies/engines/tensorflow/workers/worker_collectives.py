"""Collectives between workers on TensorFlow: its own, over gRPC or NCCL.

TensorFlow's runtime of one process can be joined with those of others, if that is
configured before its first use. Then `CollectiveReduceV2`, `CollectiveGatherV2` and
others are ordinary operations, eagerly and in programs.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from keras_strategies.cluster.group import WorkerGroup
from keras_strategies.communication.communicator import Communicator, lost_worker
from keras_strategies.communication.open_files import reserve_files
from keras_strategies.communication.packing import pack_indices
from keras_strategies.engines.tensorflow.compat.workers import abort_collectives
from keras_strategies.engines.tensorflow.workers.collective_timeouts import (
    CollectiveTimeouts,
)
from keras_strategies.engines.tensorflow.workers.instance_keys import InstanceKeys
from keras_strategies.engines.tensorflow.workers.tensor_carriers import (
    MOVED_AS,
    REDUCED_AS,
    flat,
    from_carrier,
    like,
    padded,
    to_carrier,
)
from keras_strategies.engines.tensorflow.workers.worker_server import (
    WorkerServer,
    configure,
    task_name,
)
from keras_strategies.lead.state import Loss
from keras_strategies.runtime.placement import Placement
from keras_strategies.types import (
    CommunicationImplementation,
    CommunicationOptions,
    ReduceOp,
)

#: Default size of packs in bytes.
DEFAULT_PACK = 25 * 2**20

# A collective times out later than the control plane, which reports the cause: by this
# many seconds, and by a stagger for each worker index. TensorFlow 2.21 can crash if two
# processes end a collective at the same moment (`Notification` of a freed object).
_GRACE = 3.0
_STAGGER = 0.3
_LONGEST_STAGGER = 3.0
# Group keys reserved for each generation; one for each local device is used.
_GROUPS_OF_A_GENERATION = 1000
_MERGE = {
    ReduceOp.SUM: "Add",
    ReduceOp.MEAN: "Add",
    ReduceOp.MIN: "Min",
    ReduceOp.MAX: "Max",
}
_HINTS = {
    CommunicationImplementation.AUTO: "auto",
    CommunicationImplementation.RING: "ring",
    CommunicationImplementation.NCCL: "nccl",
}
_ENDED = (
    tf.errors.UnavailableError,
    tf.errors.DeadlineExceededError,
    tf.errors.CancelledError,
    tf.errors.AbortedError,
    tf.errors.InternalError,
    # Shapes that differ between workers.
    tf.errors.InvalidArgumentError,
)


class TensorFlowCommunicator(Communicator):
    """TensorFlow's runtimes of all workers, joined for collectives.

    The runtime starts with the first strategy, when its devices are known.
    """

    def __init__(self, group: WorkerGroup, options: CommunicationOptions):
        super().__init__(group, options)
        configure(group)
        self._server = WorkerServer()
        self._keys = InstanceKeys()
        # By local device: the number of its collective group, and the variable
        # with the handle that orders the group's collectives.
        self._groups: dict[str, tuple[int, tf.Variable]] = {}
        self._device = "/device:CPU:0"
        self._timeouts = CollectiveTimeouts(lambda: self._timeout, _expired)
        group.on_loss(self._abort)

    def _replicas_set(self) -> None:
        if self._server.group is not self.group:
            with self._starting():
                self._start()

    def _reconnected(self) -> None:
        self._keys.make_table()

    def end_waits(self) -> None:
        if self._server.group is not None:
            reason = "A worker is lost, and collective ops are aborted."
            abort_collectives(tf.errors.UNAVAILABLE, reason)

    @contextlib.contextmanager
    def _starting(self) -> Iterator[None]:
        try:
            yield
        except tf.errors.OpError as error:
            raise lost_worker(self.group, error) from error

    def _start(self) -> None:
        """Connects the servers of the group, with new keys."""
        reserve_files(self.group.count)
        self._server.connect(self.group)
        self._keys.clear()
        self._timeouts.start()
        self._timeouts.forget()

    def use_device(self, device: str) -> None:
        """Sets the local device of the collectives that follow."""
        self._device = device
        if device not in self._groups:
            with tf.init_scope(), tf.device(device):
                # A program runs operations on one resource in their order.
                order = tf.Variable(0.0, trainable=False, name="order_of_collectives")
            self._groups[device] = (len(self._groups) + 1, order)
        self._keys.make_table()

    def _abort(self, loss: Loss) -> None:
        """Aborts collectives that wait for a lost worker."""
        if self._server.group is not None and self.actions.is_fixed:
            abort_collectives(tf.errors.UNAVAILABLE, self.group.describe(loss))

    def close(self) -> None:
        self._timeouts.close()
        self._groups.clear()

    @property
    def _timeout(self) -> float:
        stagger = min(_STAGGER * self.group.index, _LONGEST_STAGGER)
        return self.group.patience + _GRACE + stagger

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Converts errors of collectives in the context.

        Raises:
            WorkerError: in place of such an error; it names the lost worker.
        """
        try:
            yield
        except Exception as error:
            self._timeouts.forget()
            reason = _of_collective(error) if isinstance(error, _ENDED) else None
            if reason is None:
                raise
            raise lost_worker(self.group, type(error)(None, None, reason)) from error

    @contextlib.contextmanager
    def _exchange(self) -> Iterator[None]:
        """Context of collectives that are executed, or recorded in a program."""
        is_executed = tf.executing_eagerly()
        waits = self.group.clock.waiting() if is_executed else contextlib.nullcontext()
        with self.watched(), waits:
            yield

    # Collectives.

    def all_reduce(self, op: ReduceOp, tensors: Sequence[Any]) -> list[Any]:
        given = [tf.convert_to_tensor(tensor) for tensor in tensors]
        results: list[Any] = [None] * len(given)
        with self._exchange(), tf.device(self._device):
            for indices in self._packs(given):
                parts = [to_carrier(given[i], REDUCED_AS) for i in indices]
                reduced = self._reduce(op, flat(parts))
                for i, part in zip(indices, like(reduced, parts), strict=True):
                    results[i] = from_carrier(part, given[i].dtype, REDUCED_AS)
        if op is ReduceOp.MEAN:
            return [result / self.group.count for result in results]
        return results

    def gather_rows(self, tensor: Any, rows: Sequence[Any]) -> Any:
        """Concatenates the workers' tensors along axis 0.

        Args:
            tensor: this worker's tensor, of shape `(rows[index], ...)`.
            rows: the number of rows of each worker: ints, tensors of a program, or
                None, in which case the workers exchange them.
        """
        with self._exchange(), tf.device(self._device):
            given = tf.convert_to_tensor(tensor)
            own = to_carrier(given, MOVED_AS)
            if any(count is None for count in rows):
                counts = self._gather_static(tf.shape(own)[:1], [1] * self.group.count)
                rows = tf.unstack(counts, self.group.count)
            if all(isinstance(count, int) for count in rows):
                joined = self._gather_static(own, list(rows))
            else:
                joined = self._gather_dynamic(own, rows)
            joined = from_carrier(joined, given.dtype, MOVED_AS)
            joined.set_shape([joined.shape[0], *given.shape[1:]])
            return joined

    def _gather_static(self, own: Any, rows: list[int]) -> Any:
        most = max(rows)
        own = padded(own, most - rows[self.group.index])
        own.set_shape([most, *own.shape[1:]])
        joined = self._gather(own)
        places = self._places()
        if min(rows) == most and places == sorted(places):
            return joined
        parts = tf.split(joined, self.group.count)
        return tf.concat(
            [parts[i][:count] for i, count in zip(places, rows, strict=True)], 0
        )

    def _gather_dynamic(self, own: Any, rows: Sequence[Any]) -> Any:
        counts = tf.stack([tf.cast(count, tf.int32) for count in rows])
        # TensorFlow cannot gather zero rows.
        most = tf.maximum(tf.reduce_max(counts), 1)
        missing = most - counts[self.group.index]
        joined = self._gather(padded(own, missing))
        starts = [i * most for i in self._places()]
        parts = [joined[start : start + counts[i]] for i, start in enumerate(starts)]
        return tf.concat(parts, 0)

    def _places(self) -> list[int]:
        """The position of each worker's part in a gathered tensor.

        TensorFlow 2.21 sorts parts by the names of tasks, "task:10" before "task:2"
        (`EstablishGlobalRank`).
        """
        tasks = [task_name(self.group, rank) for rank in range(self.group.count)]
        return [sorted(tasks).index(task) for task in tasks]

    def broadcast(self, tensors: Sequence[Any], source: int = 0) -> list[Any]:
        given = [tf.convert_to_tensor(tensor) for tensor in tensors]
        results: list[Any] = list(given)
        with self._exchange(), tf.device(self._device):
            for indices in self._packs(given):
                parts = [to_carrier(given[i], MOVED_AS) for i in indices]
                sent = self._send(flat(parts), source)
                for i, part in zip(indices, like(sent, parts), strict=True):
                    results[i] = from_carrier(part, given[i].dtype, MOVED_AS)
        return results

    def _packs(self, tensors: Sequence[Any]) -> list[list[int]]:
        """Indices of the tensors of each pack, in their order."""
        limit = self.options.bytes_per_pack or DEFAULT_PACK
        packs: list[list[int]] = []
        known = [i for i, t in enumerate(tensors) if t.shape.is_fully_defined()]
        indices = pack_indices(
            [tensors[i].dtype.name for i in known],
            [tensors[i].dtype.size * math.prod(tensors[i].shape) for i in known],
            bytes_per_pack=limit,
        )
        packs.extend([known[i] for i in pack] for pack in indices)
        packs.extend([i] for i in range(len(tensors)) if i not in set(known))
        return packs

    # One operation on one tensor.

    def _reduce(self, op: ReduceOp, tensor: Any) -> Any:
        merge = _MERGE[op]
        call = self._call("reduce " + merge, tensor)
        call.update(input=tensor, merge_op=merge, final_op="Id")
        return self._timeouts.within(
            tensor, lambda: tf.raw_ops.CollectiveReduceV2(**call)
        )

    def _gather(self, tensor: Any) -> Any:
        call = self._call("gather", tensor)
        first = tensor.shape[0]

        def gather() -> Any:
            joined = tf.raw_ops.CollectiveGatherV2(input=tensor, **call)
            joined.set_shape([first and first * self.group.count, *tensor.shape[1:]])
            return joined

        return self._timeouts.within(tensor, gather)

    def _send(self, tensor: Any, source: int) -> Any:
        call = self._call(f"broadcast from {source}", tensor)
        del call["ordering_token"]
        if self.group.index == source:
            return self._timeouts.within(
                tensor, lambda: tf.raw_ops.CollectiveBcastSendV2(input=tensor, **call)
            )
        call.update(T=tensor.dtype, shape=tensor.shape)
        return self._timeouts.within(
            tensor, lambda: tf.raw_ops.CollectiveBcastRecvV2(**call)
        )

    def _call(self, kind: str, tensor: Any) -> dict[str, Any]:
        """The arguments common to all collective operations."""
        number, order = self._groups[self._device]
        number += self._server.generation * _GROUPS_OF_A_GENERATION
        implementation = CommunicationImplementation(self.options.implementation)
        return {
            "group_size": self.group.count,
            "group_key": number,
            "instance_key": self._keys.find(
                f"{kind} {tensor.dtype.name} {number}", tensor
            ),
            "ordering_token": [order.handle],
            "communication_hint": _HINTS[implementation],
            # See `CollectiveTimeouts`.
            "timeout_seconds": 0.0,
        }


def _expired() -> None:
    reason = "A collective has timed out: collective ops is aborted."
    abort_collectives(tf.errors.DEADLINE_EXCEEDED, reason)


def workers_of(placement: Placement) -> TensorFlowCommunicator | None:
    """The communicator between workers; None with one worker."""
    workers = placement.workers
    assert workers is None or isinstance(workers, TensorFlowCommunicator)
    return workers


def _of_collective(error: Any) -> str | None:
    """The message of a collective in an error; None for another error."""
    text = str(error.message or error)
    signs = ("ollective", "RecvBuf", "CompleteGroup", "CompleteInstance")
    lines = [line for line in text.splitlines() if any(s in line for s in signs)]
    causes = [line for line in lines if "ollective ops is aborted" in line]
    causes += [line for line in lines if "timed out" in line]
    # "Shape mismatch in the collective instance 1. Op at device ...", on a worker that
    # receives another worker's shape before its own exchange begins.
    causes += [line for line in lines if "ollective instance" in line]
    if isinstance(error, tf.errors.InvalidArgumentError) and not causes:
        return None
    return (causes or lines)[0].strip() if lines else None
