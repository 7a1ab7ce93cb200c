"""Workers of a cluster on JAX: processes with one mesh of all their devices.

Starts JAX's coordination service, in which processes register their devices, and the
collectives of XLA: Gloo between CPUs, NCCL between GPUs.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import socket
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import jax
import numpy as np
from jax import numpy as jnp

from keras_strategies.cluster.group import FAILURE_GRACE, WorkerGroup
from keras_strategies.cluster.group.exit_watchdog import GRACE, ExitWatchdog
from keras_strategies.communication.communicator import Communicator, lost_worker
from keras_strategies.communication.open_files import reserve_files
from keras_strategies.communication.packing import pack_indices
from keras_strategies.devices import Device, parse_device
from keras_strategies.engines.engine_sockets import EngineSockets
from keras_strategies.engines.jax import compat
from keras_strategies.engines.jax.device_collectives import reduced
from keras_strategies.engines.jax.devices import jax_device
from keras_strategies.engines.jax.workers.coordination_relay import Relay
from keras_strategies.engines.jax.workers.host_copies import HostCopies
from keras_strategies.engines.jax.workers.service_waits import until_loss
from keras_strategies.errors import BackendInUseError, ClusterError, WorkerError
from keras_strategies.lead.state import Loss
from keras_strategies.types import CommunicationOptions, ReduceOp

T = TypeVar("T")

#: Bytes per pack by default.
DEFAULT_PACK = 32 * 2**20

# Seconds for which elastic workers may compile and compute after a loss.
_COMPILATION = 300.0
_LOOPBACK = "127.0.0.1"
_WORKER_AXIS = "worker"


@dataclass
class _Runtime:
    """JAX's runtime of this process, for all strategies with its workers.

    Args:
        group: the workers that it connects; None before the start.
        front: the relay between the network and the service, in the chief.
        relay: the relay between this worker's client and the chief.
        sockets: the connections of collectives between CPUs of elastic workers.
        are_connected: whether the devices of elastic workers are connected.
        renewals: methods that are called when devices have been replaced.
        copies: the values of variables while devices are replaced.
    """

    group: WorkerGroup | None = None
    front: Relay | None = None
    relay: Relay | None = None
    sockets: EngineSockets | None = None
    are_connected: bool = False
    renewals: list[weakref.WeakMethod[Callable[[], None]]] = field(default_factory=list)
    copies: HostCopies | None = None


class JaxCommunicator(Communicator):
    """Cluster of JAX processes.

    Args:
        group: the connected workers.
        options: `CommunicationOptions`.

    Raises:
        RuntimeError: if JAX has been used already.
    """

    def __init__(self, group: WorkerGroup, options: CommunicationOptions):
        super().__init__(group, options)
        _check_unused(group)
        self.exit_watchdog = ExitWatchdog(group)
        self._runtime = _Runtime()

    # The engine.

    def start(self) -> None:
        if self._runtime.group is not self.group:
            with self.exit_watchdog.waiting():
                self._start(self.group)

    def _start(self, group: WorkerGroup) -> None:
        reserve_files(group.count)
        with _naming_lost_worker(group):
            self._start_runtime(group)
        self._runtime.group = group

    def _start_runtime(self, group: WorkerGroup) -> None:
        folder = tempfile.mkdtemp(prefix="keras_strategies-") if group.is_chief else ""
        waiting = functools.partial(until_loss, group)
        try:
            port = None
            if group.is_chief:
                port = self._start_service(group, os.path.join(folder, "jax"))
            chief = str(group.members[0]["host"])
            found: int = group.broadcast("the address of JAX's service", port)
            relay = self._runtime.relay = Relay(
                _LOOPBACK,
                lambda: socket.create_connection((chief, found), group.timeout),
                keeps=True,
            )
            with _no_proxy():
                compat.start_client(
                    f"{_LOOPBACK}:{relay.port}",
                    group.count,
                    group.index,
                    group.patience,
                    waiting,
                )
            sockets = self._runtime.sockets = EngineSockets()
            compat.use_host_for_collectives(group.own_host, sockets.listening, waiting)
            group.barrier("the start of JAX's service")
        finally:
            # All workers are connected.
            if folder:
                shutil.rmtree(folder, ignore_errors=True)

    def _start_devices(self, group: WorkerGroup) -> None:
        """Connects the devices of all workers.

        Otherwise XLA would connect them in the first step, after its compilation. Here,
        the loss of a worker ends the wait for its connection.
        """
        sockets = self._runtime.sockets
        assert sockets is not None
        # Elastic workers.
        self.exit_watchdog.grace = max(GRACE, group.timeout)

        def end_waits(loss: Loss) -> None:
            sockets.shutdown()

        group.on_loss(end_waits)
        with _naming_lost_worker(group):
            # The first use of JAX creates the devices, and Gloo's listener with them.
            jax.local_devices()
            with sockets.connecting(group):
                _connect_devices(group)
        if jax.local_devices()[0].platform == "cpu":
            # Waits end with their sockets. What remains is a step that still compiles
            # or computes, and does not wait for the lost worker.
            self.exit_watchdog.grace = max(_COMPILATION, group.timeout)
        self._runtime.are_connected = True

    def _start_service(self, group: WorkerGroup, path: str) -> int:
        """Starts JAX's service; returns its port for workers."""

        def connect() -> socket.socket:
            connection = socket.socket(socket.AF_UNIX)
            connection.connect(path)
            return connection

        # A Unix socket in a private folder: only the relay listens on the network, on
        # the interface that the cluster configures.
        compat.start_service(f"unix:{path}", group.count)
        front = self._runtime.front = Relay(group.own_host, connect, keeps=False)
        return front.port

    def close(self) -> None:
        runtime = self._runtime
        is_complete = self.group.loss() is None
        if is_complete:
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                compat.stop_client()
        # First: the last message of the service would end the other processes.
        if runtime.front is not None:
            runtime.front.close()
        self.exit_watchdog.limit_exit()
        if is_complete:
            # After the client, which would fail if its relay closed.
            if runtime.relay is not None:
                runtime.relay.close()
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                compat.stop_service()

    # Other workers.

    def end_waits(self) -> None:
        if self._runtime.sockets is not None:
            self._runtime.sockets.shutdown()

    def _reconnect(self, group: WorkerGroup) -> None:
        runtime = self._runtime
        if runtime.group is not group:
            if runtime.copies is None and runtime.are_connected:
                runtime.copies = HostCopies()
            self.exit_watchdog.replace(group)
            compat.abandon_runtime(runtime.front, runtime.relay)
            runtime.front = runtime.relay = runtime.sockets = None
            runtime.are_connected = False
            self._start(group)
        if self.has_replicas and not runtime.are_connected:
            self._start_devices(group)
        self.__dict__.pop("_mesh", None)

    def _reconnected(self) -> None:
        runtime = self._runtime
        for renewal in runtime.renewals:
            renew = renewal()
            if renew is not None:
                renew()
        if runtime.copies is not None:
            runtime.copies.restore()
            runtime.copies = None

    def when_replaced(self, renew: Callable[[], None]) -> None:
        """Registers a bound method, called when devices are replaced, before arrays."""
        self._runtime.renewals.append(weakref.WeakMethod(renew))

    # Waits for other workers.

    def waiting(self) -> contextlib.AbstractContextManager[Any]:
        # Where workers come and go, they continue when a wait has ended.
        if not self.actions.is_fixed:
            return contextlib.nullcontext()
        return self.exit_watchdog.waiting()

    def cause(self, error: BaseException) -> BaseException:
        return lost_worker(self.group, error) if _is_collective(error) else error

    @contextlib.contextmanager
    def exchange(self) -> Iterator[None]:
        """Entered around calls that wait for other workers.

        Raises:
            WorkerError: in place of the engine's error, if a worker is lost.
        """
        self.group.check()
        with self.exit_watchdog.waiting():
            try:
                yield
            except (jax.errors.JaxRuntimeError, ValueError) as error:
                if isinstance(error, ValueError) and not _is_collective(error):
                    raise
                raise lost_worker(self.group, error) from error

    def awaited(self, call: Callable[[], T]) -> T:
        """The result of a call that waits for a program with collectives.

        Elastic workers leave it soon after a loss; see `service_waits`. In a fixed
        group the watchdog ends the process.
        """
        if self.actions.is_fixed:
            return call()
        return until_loss(self.group, call, FAILURE_GRACE)

    def executed(self, program: Callable[..., T], *args: Any) -> T:
        """The results of a compiled program, which are ready."""
        return self.awaited(lambda: jax.block_until_ready(program(*args)))

    # Devices.

    def devices_of(self, own: Sequence[Device]) -> list[jax.Device]:
        """The devices of all workers, in the order of workers.

        Raises:
            ValueError: for devices of different kinds.
        """
        every = self.actions.prepare(lambda: self._names_of_devices(own))
        named = [[parse_device(name) for name in names] for names in every]
        kinds = {device.kind for devices in named for device in devices}
        if len(kinds) > 1:
            raise ClusterError(
                f"Workers use devices of different kinds: {every}. On JAX all "
                "workers run one program. Set devices of one kind on all workers, "
                "with `MultiWorkerMirroredStrategy(devices=...)`."
            )
        with self.exchange():
            return [
                jax_device(device, process)
                for process, devices in enumerate(named)
                for device in devices
            ]

    def _names_of_devices(self, own: Sequence[Device]) -> list[list[str]]:
        with self.exchange():
            if not self.actions.is_fixed and not self._runtime.are_connected:
                self._start_devices(self.group)
            return self.group.gather_values("the devices", [str(d) for d in own])

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError:
            # JAX names only the kind of the devices that it could not start.
            self.group.check()
            raise

    @functools.cached_property
    def _mesh(self) -> jax.sharding.Mesh:
        """One device of each process."""
        kind = jax.local_devices()[0].platform
        firsts = [jax_device(Device(kind, 0), i) for i in range(self.group.count)]
        return jax.sharding.Mesh(np.array(firsts), (_WORKER_AXIS,))

    # Collectives of host values.

    def all_reduce(self, op: ReduceOp, tensors: Sequence[Any]) -> list[Any]:
        arrays = [np.asarray(tensor) for tensor in tensors]
        results: list[Any] = [None] * len(arrays)
        for indices in self._packs(arrays):
            flat = np.concatenate([arrays[i].reshape(-1) for i in indices])
            reduced = self._exchanged(flat, _reduction(op, self._mesh))
            _unpack(reduced, [arrays[i] for i in indices], indices, results)
        return results

    def gather_rows(self, tensor: Any, rows: Sequence[int]) -> Any:
        return jnp.asarray(self.gather_rows_on_host(np.asarray(tensor), rows))

    def gather_rows_on_host(self, own: Any, rows: Sequence[int]) -> Any:
        """`gather_rows` of NumPy arrays; one device of each worker has the result."""
        missing = [(0, max(rows) - own.shape[0])] + [(0, 0)] * (own.ndim - 1)
        carried = _as_bytes(np.pad(own, missing))
        every = self._exchanged(carried, _gathering(self._mesh))
        parts = [
            np.frombuffer(part.tobytes(), own.dtype).reshape(-1, *own.shape[1:])
            if part.size
            else own[:0]
            for part in every
        ]
        gathered = [part[:count] for part, count in zip(parts, rows, strict=True)]
        return np.concatenate(gathered)

    def broadcast(self, tensors: Sequence[Any], source: int = 0) -> list[Any]:
        arrays = [np.asarray(tensor) for tensor in tensors]
        results: list[Any] = [None] * len(arrays)
        for indices in self._packs(arrays, ["bytes"] * len(arrays)):
            # Bytes, so that values of any dtype arrive bit by bit.
            flat = np.concatenate([_as_bytes(arrays[i]) for i in indices])
            found = self._exchanged(flat, _from(source, self._mesh)).tobytes()
            start = 0
            for i in indices:
                own = arrays[i]
                part = np.frombuffer(found, own.dtype, own.size, start)
                results[i] = part.reshape(own.shape)
                start += own.nbytes
        return results

    def _packs(
        self, arrays: Sequence[Any], kinds: Sequence[str] | None = None
    ) -> list[list[int]]:
        return pack_indices(
            kinds or [str(array.dtype) for array in arrays],
            [array.nbytes for array in arrays],
            bytes_per_pack=self.options.bytes_per_pack or DEFAULT_PACK,
        )

    def _exchanged(self, own: Any, program: Callable[[Any], Any]) -> Any:
        """The result of a program on the stacked arrays of workers."""
        split = jax.NamedSharding(self._mesh, jax.P(_WORKER_AXIS))
        mine = jax.device_put(own[None], self._mesh.devices[self.group.index])
        with self.exchange():
            stacked = jax.make_array_from_single_device_arrays(
                (self.group.count, *own.shape), split, [mine]
            )
            return self.awaited(lambda: np.asarray(program(stacked)))


@functools.cache
def _reduction(op: ReduceOp, mesh: jax.sharding.Mesh) -> Callable[[Any], Any]:
    replicated = jax.NamedSharding(mesh, jax.P())
    return jax.jit(lambda rows: reduced(op, rows), out_shardings=replicated)


@functools.cache
def _gathering(mesh: jax.sharding.Mesh) -> Callable[[Any], Any]:
    replicated = jax.NamedSharding(mesh, jax.P())
    return jax.jit(lambda rows: rows, out_shardings=replicated)


@functools.cache
def _from(source: int, mesh: jax.sharding.Mesh) -> Callable[[Any], Any]:
    replicated = jax.NamedSharding(mesh, jax.P())
    return jax.jit(lambda rows: rows[source], out_shardings=replicated)


def _as_bytes(array: Any) -> Any:
    return np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8)


def _unpack(
    flat: Any, like: Sequence[Any], indices: Sequence[int], results: list[Any]
) -> None:
    parts = np.split(flat, np.cumsum([array.size for array in like])[:-1])
    for i, part, array in zip(indices, parts, like, strict=True):
        results[i] = jnp.asarray(part.reshape(array.shape))


def _connect_devices(group: WorkerGroup) -> None:
    """Takes sums over all devices, and over one of each worker: Gloo connects them."""
    every = jax.devices()
    firsts = {device.process_index: device for device in reversed(every)}
    _sum_over(group, every)
    if len(firsts) < len(every):
        _sum_over(group, [firsts[index] for index in sorted(firsts)])


def _sum_over(group: WorkerGroup, devices: Sequence[jax.Device]) -> None:
    local = [each for each in devices if each.process_index == jax.process_index()]
    mesh = jax.sharding.Mesh(np.array(devices), ("device",))
    split = jax.NamedSharding(mesh, jax.P("device"))
    shape = jax.ShapeDtypeStruct((mesh.size,), np.float32, sharding=split)
    replicated = jax.NamedSharding(mesh, jax.P())
    program = jax.jit(jnp.sum, out_shardings=replicated).lower(shape).compile()
    # After the compilation, as its time differs: workers connect within milliseconds.
    group.barrier("the connections between devices")
    ones = [jax.device_put(np.ones(1, np.float32), device) for device in local]
    stacked = jax.make_array_from_single_device_arrays(shape.shape, split, ones)
    until_loss(group, lambda: jax.block_until_ready(program(stacked)))


def _is_collective(error: BaseException) -> bool:
    """Whether an error is one of a collective, and not of the program, such as memory.

    At the start of a program JAX 0.10 raises a `ValueError` that begins with the name
    of a status: "UNKNOWN: Gloo all-reduce failed: ...".
    """
    text = str(error)
    if not isinstance(error, jax.errors.JaxRuntimeError):
        is_status = isinstance(error, ValueError) and re.match(r"[A-Z_]+: ", text)
        if not is_status:
            return False
    return any(name in text for name in ("Gloo", "gloo", "NCCL", "nccl", "collective"))


def _check_unused(group: WorkerGroup) -> None:
    if compat.devices_are_fixed():
        raise BackendInUseError(
            "MultiWorkerMirroredStrategy was made after JAX was used in this process, "
            "so JAX's devices can no longer include those of other workers. Make the "
            "strategy first in the program, before any array, model or other strategy."
        )
    # Trainers, such as Ray's on GPUs, initialize `jax.distributed` for the same
    # processes. Its service would end all of them when one is lost.
    if compat.runtime_is_started() and not compat.end_runtime(group.index, group.count):
        raise BackendInUseError(
            "This process is in another JAX cluster: `jax.distributed.initialize` was "
            f"called, and in its cluster this is not process {group.index} of "
            f"{group.count}. Remove that call: MultiWorkerMirroredStrategy starts "
            "JAX's cluster itself, from TF_CONFIG or its cluster_resolver."
        )


@contextlib.contextmanager
def _naming_lost_worker(group: WorkerGroup) -> Iterator[None]:
    """Converts errors of JAX while its runtime starts to `WorkerError`."""
    try:
        yield
    except (jax.errors.JaxRuntimeError, RuntimeError, OSError, ValueError) as error:
        if isinstance(error, WorkerError):
            raise
        if isinstance(error, ValueError) and not _is_collective(error):
            raise
        raise lost_worker(group, error) from error


@contextlib.contextmanager
def _no_proxy() -> Iterator[None]:
    """Excludes this machine from a proxy that is configured for gRPC."""
    name = "no_grpc_proxy"
    before = os.environ.get(name)
    os.environ[name] = _LOOPBACK
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
