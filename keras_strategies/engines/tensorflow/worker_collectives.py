"""Collectives between workers on TensorFlow: its own, over gRPC or NCCL.

TensorFlow's runtime of one process can join those of others, if that is said before
it is first used. Then `CollectiveReduceV2` and its siblings are operations like all
others, eagerly and in a program, in which they run as soon as their inputs are there.

# Keys

Workers match collectives by an instance key, and the first use of a key fixes the
shape. A key therefore stands for a kind, a dtype and a shape and is reused for these.
That is safe since a worker makes one collective after another: each takes the same
resource, so that a program orders them. Where a shape is known only as a program runs,
a table in that program gives the key.
"""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import math
import os
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf
from tensorflow.core.protobuf import tensorflow_server_pb2

from keras_strategies.cluster.group import WorkerGroup
from keras_strategies.cluster.group.worker_group import LostWorker
from keras_strategies.collectives.packing import pack_indices
from keras_strategies.engines.tensorflow import compat
from keras_strategies.errors import BackendInUseError, ClusterError, GatherError
from keras_strategies.runtime.engine_sockets import EngineSockets
from keras_strategies.runtime.placement import Placement
from keras_strategies.runtime.workers import Workers, lost_worker
from keras_strategies.types import (
    CommunicationImplementation,
    CommunicationOptions,
    ReduceOp,
)

#: Bytes that travel together where nothing else is said.
DEFAULT_PACK = 25 * 2**20

# Seconds that a collective waits longer than the control plane, which has the cause,
# and how much longer than that of the worker before: TensorFlow 2.21 can crash where
# two processes end a collective in the same moment (`Notification` of a freed object).
_GRACE = 3.0
_STAGGER = 0.3
_LONGEST_STAGGER = 3.0
# More devices of a worker than have groups.
_GROUPS_OF_A_GENERATION = 1000
# Keys from here on are given by the table of shapes.
_FIRST_DYNAMIC_KEY = 2**30
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
_MOVABLE = (tf.float16, tf.float32, tf.float64, tf.int32, tf.int64)
_REDUCIBLE = (*_MOVABLE, tf.bfloat16)
# What TensorFlow can neither reduce nor move: by what is equivalent, or larger.
_CAST = {
    tf.bool: tf.int32,
    tf.int8: tf.int32,
    tf.uint8: tf.int32,
    tf.int16: tf.int32,
    tf.uint16: tf.int32,
}
_SAME_BITS = {
    tf.uint32: tf.int32,
    tf.uint64: tf.int64,
    tf.bfloat16: tf.float16,
    tf.complex64: tf.int64,
}
_MOVED_AS = {**_CAST, **_SAME_BITS}
_REDUCED_AS = {**_CAST, tf.uint32: tf.int64, tf.uint64: tf.int64}
_ENDED = (
    tf.errors.UnavailableError,
    tf.errors.DeadlineExceededError,
    tf.errors.CancelledError,
    tf.errors.AbortedError,
    tf.errors.InternalError,
    # Other shapes on other workers.
    tf.errors.InvalidArgumentError,
)


@dataclass
class _Runtime:
    """TensorFlow's runtime of this process, for all strategies with its workers.

    Args:
        group: the workers that it is connected with; None before the start.
        port: int, where this worker's server listens.
        generation: int, the number of the group, equal on its workers; part of keys.
        sockets: the connections with the servers of this group and of former ones.
        shapes: the table of shapes that have keys.
        keys: instance keys by kind, dtype and shape.
    """

    group: WorkerGroup | None = None
    port: int = 0
    generation: int = 0
    sockets: EngineSockets = field(default_factory=EngineSockets)
    shapes: Any = None
    keys: dict[tuple[Any, ...], int] = field(default_factory=dict)


class TensorFlowWorkers(Workers):
    """TensorFlow's runtimes of all workers, joined for collectives.

    The runtime starts with the first strategy, when its devices are known.
    """

    def __init__(self, group: WorkerGroup, options: CommunicationOptions):
        super().__init__(group, options)
        _configure(group)
        global _joined
        _joined = self
        self._runtime = _Runtime()
        # By local device: the group of it and its like on the other workers, and
        # what orders its collectives.
        self._groups: dict[str, tuple[int, tf.Variable]] = {}
        self._device = "/device:CPU:0"
        group.on_loss(self._abort)

    def _set_replicas(self, count: int, span: int = 1) -> None:
        super()._set_replicas(count, span)
        if self._runtime.group is not self.group:
            with self._starting():
                self._start()

    def replace(self, group: WorkerGroup) -> None:
        super().replace(group)
        self._make_table()

    def end_waits(self) -> None:
        if self._runtime.group is not None:
            reason = "A worker is lost, and collective ops are aborted."
            compat.abort_collectives(tf.errors.UNAVAILABLE, reason)

    @contextlib.contextmanager
    def _starting(self) -> Iterator[None]:
        try:
            yield
        except tf.errors.OpError as error:
            raise lost_worker(self.group, error) from error

    def _start(self) -> None:
        """Starts this worker's server, or connects it with those of another group."""
        runtime, group = self._runtime, self.group
        if not runtime.port:
            runtime.port = _free_port(group.own_host)
        # A worker that was cut off returns with the same address, and TCP would wait
        # longer with each retransmission. New connections are made after the exchange
        # of addresses, when all workers have ended these.
        runtime.sockets.shutdown()
        runtime.generation = _start(
            group, runtime.port, runtime.generation, runtime.sockets
        )
        runtime.group = group
        runtime.shapes = None
        runtime.keys.clear()

    def use_device(self, device: str) -> None:
        """Says on which local device collectives run from now on."""
        self._device = device
        if device not in self._groups:
            with tf.init_scope(), tf.device(device):
                # Whatever uses it keeps its order in a program.
                order = tf.Variable(0.0, trainable=False, name="order_of_collectives")
            self._groups[device] = (len(self._groups) + 1, order)
        self._make_table()

    def _make_table(self) -> None:
        if self._runtime.shapes is None:
            with tf.init_scope(), tf.device("/device:CPU:0"):
                self._runtime.shapes = tf.lookup.experimental.MutableHashTable(
                    tf.int64, tf.int32, -1
                )

    def _abort(self, loss: LostWorker) -> None:
        """Ends the wait for a worker that does not answer."""
        if self._runtime.group is not None and self.elastic is None:
            compat.abort_collectives(tf.errors.UNAVAILABLE, self.group.describe(loss))

    def close(self) -> None:
        self._groups.clear()

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Raises `WorkerError` for what a collective inside has failed of.

        Raises:
            WorkerError: that names the worker that was lost.
        """
        try:
            yield
        except _ENDED as error:
            reason = _of_collective(error)
            if reason is None:
                raise
            raise lost_worker(self.group, type(error)(None, None, reason)) from error

    # Collectives.

    def all_reduce(self, op: ReduceOp, tensors: Sequence[Any]) -> list[Any]:
        given = [tf.convert_to_tensor(tensor) for tensor in tensors]
        results: list[Any] = [None] * len(given)
        with self.watched(), tf.device(self._device):
            for indices in self._packs(given):
                parts = [_to_carrier(given[i], _REDUCED_AS) for i in indices]
                reduced = self._reduce(op, _flat(parts))
                for i, part in zip(indices, _like(reduced, parts), strict=True):
                    results[i] = _from_carrier(part, given[i].dtype, _REDUCED_AS)
        if op is ReduceOp.MEAN:
            return [result / self.group.count for result in results]
        return results

    def gather_rows(self, tensor: Any, rows: Sequence[Any]) -> Any:
        """Concatenates the workers' tensors along axis 0.

        Args:
            tensor: this worker's; of shape `(rows[index], ...)`.
            rows: the rows of each worker's: ints; tensors of a program; or
                None, for the workers to exchange them.
        """
        with self.watched(), tf.device(self._device):
            given = tf.convert_to_tensor(tensor)
            own = _to_carrier(given, _MOVED_AS)
            if any(count is None for count in rows):
                counts = self._gather_static(tf.shape(own)[:1], [1] * self.group.count)
                rows = tf.unstack(counts, self.group.count)
            if all(isinstance(count, int) for count in rows):
                joined = self._gather_static(own, list(rows))
            else:
                joined = self._gather_dynamic(own, rows)
            joined = _from_carrier(joined, given.dtype, _MOVED_AS)
            joined.set_shape([joined.shape[0], *given.shape[1:]])
            return joined

    def _gather_static(self, own: Any, rows: list[int]) -> Any:
        most = max(rows)
        own = _padded(own, most - rows[self.group.index])
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
        # Nothing cannot be gathered.
        most = tf.maximum(tf.reduce_max(counts), 1)
        missing = most - counts[self.group.index]
        joined = self._gather(_padded(own, missing))
        starts = [i * most for i in self._places()]
        parts = [joined[start : start + counts[i]] for i, start in enumerate(starts)]
        return tf.concat(parts, 0)

    def _places(self) -> list[int]:
        """The place of each worker's part in a gathered tensor.

        TensorFlow 2.21: by the names of tasks, of which 10 comes before 2
        (`EstablishGlobalRank`).
        """
        tasks = [_task(self.group, rank) for rank in range(self.group.count)]
        return [sorted(tasks).index(task) for task in tasks]

    def broadcast(self, tensors: Sequence[Any]) -> list[Any]:
        given = [tf.convert_to_tensor(tensor) for tensor in tensors]
        results: list[Any] = list(given)
        # Others would wait for what never comes.
        self.group.agree(
            "the model's variables (shapes and dtypes)",
            [[list(tensor.shape), tensor.dtype.name] for tensor in given],
        )
        with self.watched(), tf.device(self._device):
            for indices in self._packs(given):
                parts = [_to_carrier(given[i], _MOVED_AS) for i in indices]
                sent = self._send(_flat(parts))
                for i, part in zip(indices, _like(sent, parts), strict=True):
                    results[i] = _from_carrier(part, given[i].dtype, _MOVED_AS)
        return results

    def _packs(self, tensors: Sequence[Any]) -> list[list[int]]:
        """Indices of tensors that travel together, in their order."""
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
        return tf.raw_ops.CollectiveReduceV2(
            input=tensor,
            merge_op=merge,
            final_op="Id",
            **self._call("reduce " + merge, tensor),
        )

    def _gather(self, tensor: Any) -> Any:
        joined = tf.raw_ops.CollectiveGatherV2(
            input=tensor, **self._call("gather", tensor)
        )
        first = tensor.shape[0]
        joined.set_shape([first and first * self.group.count, *tensor.shape[1:]])
        return joined

    def _send(self, tensor: Any) -> Any:
        call = self._call("broadcast", tensor)
        del call["ordering_token"]
        if self.group.is_chief:
            return tf.raw_ops.CollectiveBcastSendV2(input=tensor, **call)
        return tf.raw_ops.CollectiveBcastRecvV2(
            T=tensor.dtype, shape=tensor.shape, **call
        )

    def _call(self, kind: str, tensor: Any) -> dict[str, Any]:
        """The arguments that all collectives have."""
        number, order = self._groups[self._device]
        number += self._runtime.generation * _GROUPS_OF_A_GENERATION
        implementation = CommunicationImplementation(self.options.implementation)
        return {
            "group_size": self.group.count,
            "group_key": number,
            "instance_key": self._key(f"{kind} {tensor.dtype.name} {number}", tensor),
            "ordering_token": [order.handle],
            "communication_hint": _HINTS[implementation],
            "timeout_seconds": self.group.patience
            + _GRACE
            + min(_STAGGER * self.group.index, _LONGEST_STAGGER),
        }

    def _key(self, kind: str, tensor: Any) -> Any:
        """The instance key, see at the top."""
        if not tensor.shape.is_fully_defined():
            return self._key_in_program(kind, tensor)
        signature = (kind, *tensor.shape)
        keys = self._runtime.keys
        if signature not in keys:
            # Not by a counter: a program that one worker alone traces is no harm.
            key = 1 + _number_of(repr(signature)) % (_FIRST_DYNAMIC_KEY - 1)
            while key in keys.values():
                key += 1
            keys[signature] = key
        return keys[signature]

    def _key_in_program(self, kind: str, tensor: Any) -> Any:
        with tf.device("/device:CPU:0"):
            sizes = tf.shape(tensor, out_type=tf.int64)
            factors = [_number_of(f"axis {i}") for i in range(tensor.shape.rank)]
            signature = tf.reduce_sum(sizes * tf.constant(factors, tf.int64))
            signature += tf.constant(_number_of(kind), tf.int64)
            table = self._runtime.shapes
            new = _FIRST_DYNAMIC_KEY + tf.cast(table.size(), tf.int32)
            key = tf.raw_ops.LookupTableFindV2(
                table_handle=table.resource_handle, keys=signature, default_value=new
            )
            table.insert(signature, key)
            return key


def workers_of(placement: Placement) -> TensorFlowWorkers | None:
    """The engine between workers; None where there is one worker."""
    workers = placement.workers
    assert workers is None or isinstance(workers, TensorFlowWorkers)
    return workers


# A process belongs to one cluster.
_joined: TensorFlowWorkers | None = None


def joined_workers() -> TensorFlowWorkers | None:
    """The engine that this process has joined; None without one."""
    return _joined


def _configure(group: WorkerGroup) -> None:
    """Says that there will be other workers, while it can be said."""
    try:
        compat.configure_collectives(_task(group, 0), _task(group, group.index))
    except RuntimeError as error:
        raise BackendInUseError(
            "MultiWorkerMirroredStrategy has to be made before TensorFlow is first "
            "used, and it has been used in this process: a tensor, a variable, a model "
            "or a data set was made, or its devices were listed. Make the strategy "
            "right after the imports."
        ) from error


def _number(group: WorkerGroup, rank: int) -> int:
    """The number of a worker's task, which its devices have in their names.

    In an elastic group it is the worker's in the cluster, the same in all generations.
    """
    return int(group.members[rank].get("index", rank))


def _task(group: WorkerGroup, rank: int) -> str:
    return f"/job:worker/replica:0/task:{_number(group, rank)}"


def _start(group: WorkerGroup, port: int, previous: int, sockets: EngineSockets) -> int:
    """Starts this worker's server, or connects it with those of another group.

    Args:
        group: the workers.
        port: int, where the server listens.
        previous: int, the generation that the server has been started for; 0 for none.
        sockets: gets the addresses of all servers.

    Returns:
        int, the generation.
    """
    host = group.own_host
    named = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    found = group.gather_values("TensorFlow's servers", [named, previous])
    tasks = {_number(group, rank): each for rank, (each, _) in enumerate(found)}
    for each in tasks.values():
        address, _, number = each.rpartition(":")
        sockets.add(address.strip("[]"), int(number))
    generation = 1 + max(each for _, each in found)
    server = tensorflow_server_pb2.ServerDef(
        cluster=tf.train.ClusterSpec({"worker": tasks}).as_cluster_def(),
        # With the virtual devices that there are by now.
        default_session_config=compat.collective_configuration(_task(group, 0)),
        job_name="worker",
        task_index=_number(group, group.index),
        protocol="grpc",
    )
    if previous:
        compat.replace_collectives(server)
        group.barrier("the start of TensorFlow's servers")
        return generation
    try:
        compat.start_collectives(server)
    except tf.errors.OpError as error:
        raise ClusterError(
            f"TensorFlow's server of worker {group.index} could not listen at {named}: "
            f"{error.message}. Something else has taken the port in this moment; start "
            "all workers again."
        ) from error
    if ipaddress.ip_address(host.partition("%")[0]).is_loopback:
        _accept_from_this_machine_only(port)
    group.barrier("the start of TensorFlow's servers")
    return generation


def _free_port(host: str) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _accept_from_this_machine_only(port: int) -> None:
    """Closes a server at every address but loopback ones, where Linux can do that.

    TensorFlow's server listens at all addresses of the machine, and has no option
    that names one.
    """
    option = getattr(socket, "SO_BINDTODEVICE", None)
    if option is None or not os.path.isdir("/proc/self/fd"):
        return
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            number = os.dup(int(name))
            stack.callback(os.close, number)
            found = socket.socket(fileno=number)
            stack.callback(found.detach)
            if (
                found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                and found.getsockname()[1] == port
            ):
                found.setsockopt(socket.SOL_SOCKET, option, b"lo\0")


def _of_collective(error: Any) -> str | None:
    """The message of a collective in an error; None for another error."""
    text = str(error.message or error)
    signs = ("ollective", "RecvBuf", "CompleteGroup", "CompleteInstance")
    lines = [line for line in text.splitlines() if any(s in line for s in signs)]
    causes = [line for line in lines if "ollective ops is aborted" in line]
    causes += [line for line in lines if "timed out" in line]
    # "Shape mismatch in the collective instance 1. Op at device ...", of the worker
    # that hears of another one's shape before its own exchange begins.
    causes += [line for line in lines if "ollective instance" in line]
    if isinstance(error, tf.errors.InvalidArgumentError) and not causes:
        return None
    return (causes or lines)[0].strip() if lines else None


def _number_of(text: str) -> int:
    """A number of 62 bits, the same in all processes."""
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 2


# Tensors as TensorFlow's collectives take them.


def _to_carrier(tensor: Any, carriers: dict[Any, Any]) -> Any:
    kind = carriers.get(tensor.dtype, tensor.dtype)
    can_travel = _REDUCIBLE if carriers is _REDUCED_AS else _MOVABLE
    if kind not in can_travel:
        raise GatherError(
            f"A tensor of dtype {tensor.dtype.name} cannot be sent between workers "
            "on TensorFlow: collectives are of numbers. Convert it first."
        )
    if kind == tensor.dtype:
        return tensor
    if carriers is _MOVED_AS and tensor.dtype in _SAME_BITS:
        return tf.bitcast(tensor, kind)
    return tf.cast(tensor, kind)


def _from_carrier(tensor: Any, kind: Any, carriers: dict[Any, Any]) -> Any:
    if tensor.dtype == kind:
        return tensor
    if carriers is _MOVED_AS and kind in _SAME_BITS:
        return tf.bitcast(tensor, kind)
    return tf.cast(tensor, kind)


def _flat(tensors: Sequence[Any]) -> Any:
    if len(tensors) == 1:
        return tensors[0]
    return tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], 0)


def _like(flat: Any, tensors: Sequence[Any]) -> list[Any]:
    if len(tensors) == 1:
        flat.set_shape(tensors[0].shape)
        return [flat]
    parts = tf.split(flat, [math.prod(tensor.shape) for tensor in tensors])
    return [
        tf.reshape(part, tensor.shape)
        for part, tensor in zip(parts, tensors, strict=True)
    ]


def _padded(tensor: Any, missing: Any) -> Any:
    """A tensor with more rows, of zeros."""
    if isinstance(missing, int) and missing == 0:
        return tf.identity(tensor)
    widths = [[0, missing], *([[0, 0]] * (len(tensor.shape) - 1))]
    return tf.pad(tensor, widths)
