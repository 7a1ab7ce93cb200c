"""TensorFlow's server of a worker, connected with those of the others."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from dataclasses import dataclass, field

import tensorflow as tf
from tensorflow.core.protobuf import tensorflow_server_pb2

from keras_strategies.cluster.group import WorkerGroup
from keras_strategies.engines.tensorflow import compat
from keras_strategies.errors import BackendInUseError, ClusterError
from keras_strategies.runtime.engine_sockets import EngineSockets


@dataclass
class WorkerServer:
    """TensorFlow's server of this process, for all strategies with its workers.

    Args:
        group: the workers that it is connected with; None before the start.
        port: int, where it listens.
        generation: int, the number of the group, equal on its workers; 0 before the
            start.
        sockets: the connections with the servers of this group and of former ones.
    """

    group: WorkerGroup | None = None
    port: int = 0
    generation: int = 0
    sockets: EngineSockets = field(default_factory=EngineSockets)

    def connect(self, group: WorkerGroup) -> None:
        """Starts the server, or connects it with those of another group."""
        if not self.port:
            self.port = _free_port(group.own_host)
        # A worker that was cut off returns with the same address, and TCP would wait
        # longer with each retransmission. New connections are made after the exchange
        # of addresses, when all workers have ended these.
        self.sockets.shutdown()
        self.generation = self._start(group)
        self.group = group

    def _start(self, group: WorkerGroup) -> int:
        """The generation of the group, when all of its servers are connected."""
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
            # With the virtual devices that there are by now.
            default_session_config=compat.collective_configuration(task_name(group, 0)),
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
                f"TensorFlow's server of worker {group.index} could not listen at "
                f"{named}: {error.message}. Something else has taken the port in this "
                "moment; start all workers again."
            ) from error
        if ipaddress.ip_address(host.partition("%")[0]).is_loopback:
            _accept_from_this_machine_only(self.port)
        group.barrier("the start of TensorFlow's servers")
        return generation


def configure(group: WorkerGroup) -> None:
    """Announces the other workers, before the runtime is started."""
    try:
        compat.configure_collectives(task_name(group, 0), task_name(group, group.index))
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


def task_name(group: WorkerGroup, rank: int) -> str:
    """The name of a worker in TensorFlow."""
    return f"/job:worker/replica:0/task:{_number(group, rank)}"


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
