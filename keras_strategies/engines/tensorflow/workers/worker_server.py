"""TensorFlow's server of a worker, connected with those of the others."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field

import tensorflow as tf
from tensorflow.core.protobuf import tensorflow_server_pb2

from keras_strategies.cluster.group import WorkerGroup
from keras_strategies.engines.engine_sockets import EngineSockets
from keras_strategies.engines.tensorflow.compat.workers import (
    collective_configuration,
    configure_collectives,
    replace_collectives,
    start_collectives,
)
from keras_strategies.errors import BackendInUseError, ClusterError

_SHARES = hasattr(socket, "SO_REUSEPORT")


@dataclass
class WorkerServer:
    """TensorFlow's server of this process, for all strategies with its workers.

    Args:
        group: the connected workers; None before the start.
        port: int, the port at which the server listens; 0 before the start.
        generation: int, the number of the group, equal on its workers; 0 before the
            start.
        sockets: the connections to the servers of this group and of previous ones.
    """

    group: WorkerGroup | None = None
    port: int = 0
    generation: int = 0
    sockets: EngineSockets = field(default_factory=EngineSockets)

    def connect(self, group: WorkerGroup) -> None:
        """Starts the server, or connects it to the servers of another group."""
        # A disconnected worker rejoins with the same address, and old connections to it
        # would wait longer with each TCP retransmission. New connections are made after
        # the exchange of addresses, when all workers have closed the old ones.
        self.sockets.shutdown()
        if self.port:
            self.generation = self._start(group)
        else:
            with _reserved_port(group.own_host) as self.port:
                self.generation = self._start(group)
        self.group = group

    def _start(self, group: WorkerGroup) -> int:
        """Connects all servers of the group; returns its generation."""
        previous = self.generation
        host = group.own_host
        named = f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"
        found = group.gather_values("TensorFlow's servers", [named, previous])
        tasks = {_number(group, rank): each for rank, (each, _) in enumerate(found)}
        for each in tasks.values():
            address, _, number = each.rpartition(":")
            self.sockets.add(address.strip("[]"), int(number))
        generation = 1 + max(each for _, each in found)
        server = tensorflow_server_pb2.ServerDef(
            cluster=tf.train.ClusterSpec({"worker": tasks}).as_cluster_def(),
            # Includes the virtual devices configured so far.
            default_session_config=collective_configuration(task_name(group, 0)),
            job_name="worker",
            task_index=_number(group, group.index),
            protocol="grpc",
        )
        if previous:
            replace_collectives(server)
            group.barrier("the start of TensorFlow's servers")
            return generation
        try:
            with _shared_ports():
                start_collectives(server)
        except tf.errors.OpError as error:
            raise ClusterError(
                f"TensorFlow's server of worker {group.index} could not listen at "
                f"{named}: {error.message}. Another process may have taken the port "
                "meanwhile. Start all workers again."
            ) from error
        if ipaddress.ip_address(host.partition("%")[0]).is_loopback:
            _accept_from_this_machine_only(self.port)
        group.barrier("the start of TensorFlow's servers")
        return generation


def configure(group: WorkerGroup) -> None:
    """Configures collectives of the group, before the runtime is started."""
    try:
        configure_collectives(task_name(group, 0), task_name(group, group.index))
    except RuntimeError as error:
        raise BackendInUseError(
            "MultiWorkerMirroredStrategy was made after TensorFlow was used in this "
            "process: a tensor, variable, model or dataset was created, or its devices "
            "were listed. Make the strategy right after the imports."
        ) from error


def _number(group: WorkerGroup, rank: int) -> int:
    """The task number of a worker, which is part of the names of its devices.

    In an elastic group it is the worker's index in the cluster, which is the same in
    all generations.
    """
    return int(group.members[rank].get("index", rank))


def task_name(group: WorkerGroup, rank: int) -> str:
    """The name of a worker in TensorFlow."""
    return f"/job:worker/replica:0/task:{_number(group, rank)}"


@contextlib.contextmanager
def _reserved_port(host: str) -> Iterator[int]:
    """A port at which nothing else listens, and that no connection takes meanwhile.

    A server starts when all workers have exchanged their ports; until then a socket is
    bound to it, which shares it with the server (`_shared_ports`).
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as reservation:
        if _SHARES:
            reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        # TensorFlow's server listens at all addresses.
        reservation.bind(("", 0))
        port = int(reservation.getsockname()[1])
        if not _SHARES:
            reservation.close()
        yield port


@contextlib.contextmanager
def _shared_ports() -> Iterator[None]:
    """TensorFlow's server shares its port, by an environment variable of TensorFlow."""
    name = "TF_GRPC_REUSE_PORT"
    before = os.environ.get(name)
    os.environ[name] = "1" if _SHARES else "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _accept_from_this_machine_only(port: int) -> None:
    """Binds a listening server to the loopback interface, on Linux.

    TensorFlow's server listens at all addresses of the machine; it has no option for
    one address.
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
