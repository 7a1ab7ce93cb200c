"""Collectives between workers on Torch: Gloo between CPUs, NCCL between GPUs."""

from __future__ import annotations

import contextlib
import datetime
import functools
import socket
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from keras_strategies.cluster.group import FAILURE_GRACE, WorkerGroup
from keras_strategies.communication.communicator import Communicator, lost_worker
from keras_strategies.communication.open_files import reserve_files
from keras_strategies.communication.packing import pack_indices
from keras_strategies.engines.engine_sockets import EngineSockets
from keras_strategies.engines.torch.compat import (
    all_gather_into,
    create_gloo_group,
    gloo_device,
    reduce_scatter_into,
)
from keras_strategies.engines.torch.gloo_waits import keep_to_the_end, wait_for
from keras_strategies.engines.torch.host_staging import gloo_for
from keras_strategies.engines.torch.memory_formats import (
    axis_order,
    in_axis_order,
    in_format_of,
)
from keras_strategies.engines.torch.nccl_works import (
    NcclWorks,
    check_own_gpus,
    create_nccl_group,
    gpu_uuid,
)
from keras_strategies.errors import ClusterError, KerasStrategiesError, WorkerError
from keras_strategies.types import (
    CommunicationImplementation,
    CommunicationOptions,
    ReduceOp,
)

#: Default size of packs in bytes, as in torch's DDP.
DEFAULT_PACK = 25 * 2**20
#: Tensors in shards are at least so many packs, if these are not smaller than this.
PACKS, SMALLEST_PACK = 16, 4 * 2**20

_OPERATIONS: dict[ReduceOp, Any] = {
    ReduceOp.SUM: dist.ReduceOp.SUM,
    ReduceOp.MIN: dist.ReduceOp.MIN,
    ReduceOp.MAX: dist.ReduceOp.MAX,
}
#: Seconds that the end of a process waits for process groups to abort.
_ABORT_SECONDS = 5.0
# Seconds between two looks at a wait, after a worker has reported its failure.
_FAILURE_TICK = 0.2
# Minimum timeout of a connection to the store in the chief's process.
_CONNECT_SECONDS = 10.0
# Registered name of Gloo on a chosen interface.
_GLOO = "keras_strategies_gloo"
# Dtypes that Gloo does not support.
_CARRIERS = {torch.bool: torch.uint8}


class TorchCommunicator(Communicator):
    """Collectives on process groups that are separate from torch's default group.

    If a default group exists, Keras 3.16 wraps models in `DistributedDataParallel`,
    which would reduce gradients twice; and user code may have created one.
    """

    def __init__(self, group: WorkerGroup, options: CommunicationOptions):
        super().__init__(group, options)
        group.clock.sees_waits = True
        self._timeout = datetime.timedelta(seconds=group.patience)
        self._groups: dict[str, Any] = {}
        self._works = NcclWorks()
        self._sockets = EngineSockets()
        # The store of addresses, which the first collective creates.
        self._store: Any = None
        self._before_exchange: Callable[[], None] | None = None
        # The Gloo groups of torch's default process group, if it was created here.
        self._default: list[Any] = []
        self._aborting = threading.Lock()
        group.on_loss(lambda loss: self._abort())
        group.on_failure(self._watch_waits)

    def before_exchanges(self, function: Callable[[], None]) -> None:
        """Calls a function before each collective of an elastic group."""
        self._before_exchange = function

    def _engine(self, device: torch.device) -> Any:
        """The process group for tensors of a device, created on demand."""
        self.steps.await_checks()
        if self._before_exchange is not None:
            self._before_exchange()
        use_nccl = self._uses_nccl(device)
        kind = "nccl" if use_nccl else "gloo"
        if kind not in self._groups:
            if use_nccl:
                # Waits are on the GPU, where the clock cannot measure them.
                self.group.clock.sees_waits = False
            # Raises if a worker is lost; processes that connect would wait for it.
            self._connect(kind, gpu_uuid(device) if use_nccl else "")
            ranks = self.group.index, self.group.count
            store = dist.PrefixStore(kind, self._store)
            self._groups[kind] = (
                create_nccl_group(store, *ranks, self._timeout)
                if use_nccl
                else self._gloo(store)
            )
        group = self._groups[kind]
        return group if use_nccl else gloo_for(group, device)

    def _connect(self, kind: str, uuid: str = "") -> None:
        """Connects this worker with the store, which is in the chief's process.

        Args:
            kind: str, of the collectives that begin.
            uuid: str, the GPU of this worker, for NCCL.
        """
        reserve_files(self.group.count)
        if self._store is None and self.group.is_chief:
            self._store = _served_store(self.group, self._timeout)
        port = self._store.port if self.group.is_chief else 0
        what = f"the first collective by {kind}"
        found = self.group.gather_values(what, [uuid, port], stream=kind)
        check_own_gpus([each for each, _ in found])
        host, port = str(self.group.members[0]["host"]), found[0][1]
        self._sockets.add(host, port)
        if self._store is None:
            self._store = _reached_store(host, port, self.group, self._timeout)

    def _uses_nccl(self, device: torch.device) -> bool:
        is_ring = self.options.implementation is CommunicationImplementation.RING
        return device.type == "cuda" and not is_ring

    def _gloo(self, store: Any) -> Any:
        group = self.group
        ranks = group.index, group.count
        begin = functools.partial(create_gloo_group, store, *ranks, self._timeout)
        with _naming_loss(group):
            device = self._sockets.listening(lambda: gloo_device(group.own_host))
            with self._sockets.connecting(group):
                return begin(device)

    def _abort(self) -> None:
        """Aborts collectives that wait for a lost worker."""
        with self._aborting:
            for engine in (*list(self._groups.values()), *self._default):
                engine.abort()

    def _watch_waits(self) -> None:
        """Ends waits for a worker that has left a call by an error, and lives on."""
        threading.Thread(target=self._end_hopeless_wait, daemon=True).start()

    def _end_hopeless_wait(self) -> None:
        group = self.group
        while group.failure_since(0.0) is not None:
            time.sleep(_FAILURE_TICK)
            is_late = group.failure_since(FAILURE_GRACE) is not None
            if is_late and group.clock.wait_seconds >= FAILURE_GRACE:
                # Gloo's `abort` does not end a wait for a process that is alive.
                self.end_waits()
                return

    def end_waits(self) -> None:
        self._abort()
        self._sockets.shutdown()

    def _reconnect(self, group: WorkerGroup) -> None:
        with self._aborting:
            # Copies of this object, for other strategies, share the dict.
            self._groups.clear()
            self._groups, self._sockets = {}, EngineSockets()
            self._works, self._store = NcclWorks(), None
        group.clock.sees_waits = True

    def close(self) -> None:
        # A thread that returned from C++ after the end of the interpreter would end the
        # process with "terminate called".
        is_free = self._aborting.acquire(timeout=_ABORT_SECONDS)
        keep_to_the_end()
        self._groups.clear()
        if self._default:
            self._default.clear()
            dist.destroy_process_group()
        if is_free:
            self._aborting.release()

    def start_default_group(self) -> None:
        """Creates torch's default process group of these workers, if none exists.

        `torch.distributed.tensor` communicates by it and by its subgroups.

        Raises:
            ClusterError: if a default group of other processes exists.
        """
        index, count = self.group.index, self.group.count
        if dist.is_initialized():
            found = dist.get_rank(), dist.get_world_size()
            if found != (index, count):
                raise ClusterError(
                    f"This process is rank {found[0]} of {found[1]} in Torch's "
                    f"default process group, but worker {index} of {count} in the "
                    "cluster. Remove `torch.distributed.init_process_group`: the "
                    "strategy creates the group."
                )
            return
        self._connect("default")
        # Torch's operations exchange shards, which the clock cannot measure.
        self.group.clock.sees_waits = False

        def gloo(store: Any, rank: int, size: int, timeout: Any) -> Any:
            # On the network interface of the cluster's address only.
            device = gloo_device(self.group.own_host)
            engine = create_gloo_group(store, rank, size, self._timeout, device)
            self._default.append(engine)
            return engine

        if _GLOO not in dist.Backend.backend_list:
            dist.Backend.register_backend(_GLOO, gloo, devices=["cpu"])
        # Torch warns of a group with one kind of device that is named with it.
        has_gpus = torch.cuda.is_available()
        backend = f"cpu:{_GLOO},cuda:nccl" if has_gpus else _GLOO
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("default", self._store),
            rank=index,
            world_size=count,
            timeout=self._timeout,
        )

    def cause(self, error: BaseException) -> BaseException:
        is_own = isinstance(error, KerasStrategiesError)
        if self._default and isinstance(error, RuntimeError) and not is_own:
            # Torch's operations on DTensors raise it in a failed collective.
            loss = self.group.loss(wait=min(self.group.timeout, 5.0))
            if loss is not None or self.group.has_ended:
                return lost_worker(self.group, error)
        return error

    def _begin(
        self, device: torch.device, begin: Callable[[Any], Any]
    ) -> Callable[[], None]:
        """Begins a collective of a process group; returns a callable that waits."""
        with _naming_loss(self.group):
            work = begin(self._engine(device))

        def wait() -> None:
            with _naming_loss(self.group), self.group.clock.waiting():
                if self._uses_nccl(device):
                    work.wait()
                    self._works.add(work)
                else:
                    wait_for(work, self._groups.get("gloo"), self._has_ended)

        return wait

    def _has_ended(self) -> bool:
        group = self.group
        return group.has_ended or group.failure_since(FAILURE_GRACE) is not None

    def confirm(self) -> None:
        with _naming_loss(self.group):
            self._works.confirm(self.group)

    def use_unconfirmed(self) -> None:
        """Lets the host go on with results that the end of the step confirms.

        An elastic group confirms them first: it repeats a step from weights that were
        not changed.
        """
        if self.actions.is_fixed:
            self._works.use()
        else:
            self.confirm()

    @property
    def has_used_unconfirmed(self) -> bool:
        """Whether results were used that were not confirmed since."""
        return self._works.are_used

    # Collectives.

    def all_reduce(
        self, op: ReduceOp, tensors: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        return self._in_packs(tensors, lambda flat: self.start_all_reduce(op, flat)())

    def _in_packs(
        self, tensors: Sequence[torch.Tensor], exchange: Callable[[torch.Tensor], None]
    ) -> list[torch.Tensor]:
        """Results of a collective in place, of packs of tensors."""
        results: list[Any] = [None] * len(tensors)
        for indices in self.packs(tensors):
            pack = Pack([tensors[i] for i in indices])
            exchange(pack.flat)
            for i, result in zip(indices, pack.tensors(), strict=True):
                results[i] = result
        return results

    def packs(
        self, tensors: Sequence[torch.Tensor], are_sharded: bool = False
    ) -> list[list[int]]:
        """Indices of the tensors of each pack, in their order.

        Args:
            tensors: the tensors.
            are_sharded: see `packs_of_sizes`.
        """
        kinds = [(tensor.dtype, tensor.device) for tensor in tensors]
        sizes = [tensor.nbytes for tensor in tensors]
        return self.packs_of_sizes(sizes, are_sharded, kinds)

    def packs_of_sizes(
        self,
        sizes: Sequence[int],
        are_sharded: bool = False,
        kinds: Sequence[Hashable] | None = None,
    ) -> list[list[int]]:
        """Indices of the tensors of each pack, in their order.

        Args:
            sizes: their bytes.
            are_sharded: bool, whether processes have shards of the tensors, and packs
                of full values are in memory one after the other: these are small parts
                of the tensors.
            kinds: what a pack has one of, for each tensor; None for equal ones.
        """
        limit = self.options.bytes_per_pack or DEFAULT_PACK
        if are_sharded and not self.options.bytes_per_pack:
            limit = min(limit, max(SMALLEST_PACK, sum(sizes) // PACKS))
        kinds = kinds or [None] * len(sizes)
        return pack_indices(kinds, sizes, bytes_per_pack=limit)

    def start_all_reduce(self, op: ReduceOp, flat: torch.Tensor) -> Callable[[], None]:
        """Begins to reduce a tensor in place.

        Returns:
            A callable that waits until it is done; the result is valid after
            `confirm`.
        """
        options = dist.AllreduceOptions()
        options.reduceOp = _OPERATIONS.get(op, dist.ReduceOp.SUM)
        wait = self._begin(
            flat.device, lambda engine: engine.allreduce([flat], options)
        )

        def finish() -> None:
            wait()
            if op is ReduceOp.MEAN:
                flat.div_(self.group.count)

        return finish

    def start_reduce_scatter(
        self, own: torch.Tensor, parts: torch.Tensor
    ) -> Callable[[], None]:
        """Begins to sum tensors over workers, each of which gets its part of the sum.

        Args:
            own: receives the part, of shape `(numbers,)`.
            parts: of shape `(workers, numbers)`, the parts of all workers.

        Returns:
            A callable that waits, as that of `start_all_reduce`.
        """
        return self._begin(
            own.device, lambda engine: reduce_scatter_into(engine, own, parts.view(-1))
        )

    def start_all_gather(
        self, every: torch.Tensor, own: torch.Tensor
    ) -> Callable[[], None]:
        """Begins to concatenate tensors of equal shapes along axis 0.

        Args:
            every: receives those of all workers, of shape `(workers * n, ...)`.
            own: that of this worker, of shape `(n, ...)`.

        Returns:
            A callable that waits, as that of `start_all_reduce`.
        """
        return self._begin(
            own.device, lambda engine: all_gather_into(engine, every, own)
        )

    def gather_rows(self, tensor: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        kind = tensor.dtype
        own = tensor.detach().to(_CARRIERS.get(kind, kind)).contiguous()
        most = max(rows)
        if own.shape[0] < most:
            # It requires equal lengths.
            missing = own.new_zeros((most - own.shape[0], *own.shape[1:]))
            own = torch.cat([own, missing])
        joined = own.new_empty((most * len(rows), *own.shape[1:]))
        if joined.numel():
            self.start_all_gather(joined, own)()
        if any(count < most for count in rows):
            pairs = zip(joined.split(most), rows, strict=True)
            joined = torch.cat([part[:count] for part, count in pairs])
        return in_format_of(joined.to(kind), tensor)

    def broadcast(
        self, tensors: Sequence[torch.Tensor], source: int = 0
    ) -> list[torch.Tensor]:
        options = dist.BroadcastOptions()
        options.rootRank = source

        def exchange(flat: torch.Tensor) -> None:
            self._begin(flat.device, lambda engine: engine.broadcast([flat], options))()

        results = self._in_packs(list(map(torch.as_tensor, tensors)), exchange)
        self.confirm()
        return results


class Pack:
    """Tensors of one dtype and device in one message."""

    def __init__(self, tensors: Sequence[torch.Tensor]):
        # Without the tensors, which are freed.
        self._like = [(t.shape, t.numel(), axis_order(t)) for t in tensors]
        self._dtype = tensors[0].dtype
        carrier = _CARRIERS.get(self._dtype)
        with torch.no_grad():
            flat = [tensor.reshape(-1) for tensor in tensors]
            if carrier is not None:
                flat = [tensor.to(carrier) for tensor in flat]
            self.flat = torch.cat(flat)

    def tensors(self) -> list[torch.Tensor]:
        """The tensors, as views of the flat one, or copies in their memory formats."""
        parts = self.flat.split([size for _, size, _ in self._like])
        found = [
            in_axis_order(part.view(shape), order)
            for part, (shape, _, order) in zip(parts, self._like, strict=True)
        ]
        if self.flat.dtype != self._dtype:
            found = [part.to(self._dtype) for part in found]
        return found


def _served_store(group: WorkerGroup, timeout: datetime.timedelta) -> Any:
    """Store for the addresses of process groups, in the chief's process."""
    # On the network interface of the cluster's address only.
    host = group.own_host
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    server = socket.create_server((host, 0), family=family)
    return dist.TCPStore(
        host,
        server.getsockname()[1],
        group.count,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=server.detach(),
        use_libuv=True,
    )


@contextlib.contextmanager
def _naming_loss(group: WorkerGroup) -> Iterator[None]:
    """Turns errors of Torch into that of the lost worker; those of checks stay."""
    try:
        yield
    except WorkerError:
        raise
    except RuntimeError as error:
        raise lost_worker(group, error) from error


def _reached_store(
    host: str, port: int, group: WorkerGroup, timeout: datetime.timedelta
) -> Any:
    """The chief's store, which listens by now, unless the chief has been lost since.

    Raises:
        WorkerError: if so.
    """
    seconds = datetime.timedelta(seconds=max(_CONNECT_SECONDS, group.timeout))
    with _naming_loss(group):
        store = dist.TCPStore(
            host,
            port,
            group.count,
            is_master=False,
            timeout=min(timeout, seconds),
            wait_for_workers=False,
        )
    store.set_timeout(timeout)
    return store
