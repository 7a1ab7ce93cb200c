"""A cluster of processes, from its start to its end."""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import shutil
import tempfile
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keras_strategies.errors import SnapshotError, WorkerError
from keras_strategies.parameter_server.coordinator.cluster_state import LocalVariables
from keras_strategies.parameter_server.coordinator.ray_launcher import (
    Manager,
    Start,
    environment,
    private_folder,
)
from keras_strategies.parameter_server.coordinator.scheduler import Dispatcher
from keras_strategies.parameter_server.engines import get_engine
from keras_strategies.parameter_server.server import server_process as server_module
from keras_strategies.parameter_server.server.snapshots import check_folder
from keras_strategies.parameter_server.wire.heartbeat import start_beating
from keras_strategies.parameter_server.wire.server_connections import Servers
from keras_strategies.parameter_server.wire.transport import Connection, Keys, Service
from keras_strategies.parameter_server.worker.step_execution import (
    Execution,
    WorkerReceiver,
)
from keras_strategies.parameter_server.worker.worker_loop import Worker


@dataclass(frozen=True)
class ClusterOptions:
    """How a cluster runs; see `ParameterServerStrategy` for what each means."""

    workers: int = 2
    servers: int = 1
    max_staleness: int | None = None
    pull_ahead: bool = False
    snapshot_seconds: float | None = None
    snapshot_folder: str | None = None
    on_snapshot_error: str = "raise"
    timeout_seconds: float = 120.0
    silence_seconds: float = 30.0
    start_seconds: float = 180.0


class Cluster:
    """The coordinator's side of everything.

    Args:
        options: `ClusterOptions`.
        worker_entry: str, `"module:function"`, what runs in a worker's process.
        control: str, the coordinator's address; None for a local cluster.
        addresses: list of str, the servers'; None for a local cluster.
        keys: `Keys` where addresses are not local.
    """

    def __init__(
        self,
        options: ClusterOptions,
        worker_entry: str,
        control: str | None = None,
        addresses: list[str] | None = None,
        keys: Keys | None = None,
    ):
        self.options = options
        self._keys = keys
        self._worker_entry = worker_entry
        self._is_closed = False
        self._close_lock = threading.Lock()
        self._folder = private_folder()
        folder = Path(self._folder.name)
        #: Whether this process starts the others.
        self.is_local = is_local = control is None
        self._addresses = addresses or [
            f"ipc://{folder}/ps-{i}" for i in range(options.servers)
        ]
        self._snapshots = options.snapshot_folder
        self._own_snapshots: str | None = None
        if options.snapshot_seconds is not None and self._snapshots is None:
            self._own_snapshots = tempfile.mkdtemp(prefix="ks-snapshots-")
            self._snapshots = self._own_snapshots
        if self._snapshots is not None and is_local:
            self._check_snapshots(self._snapshots)
        self._name = secrets.token_hex(8)
        self._service = Service(control or f"ipc://{folder}/control", keys)
        self.local = LocalVariables()
        self.dispatcher = Dispatcher(
            self._service,
            options.workers,
            options.servers,
            self._process if is_local else None,
            self.local,
            options.max_staleness,
            options.pull_ahead,
            options.silence_seconds,
            # Of servers that others have started, it is known when they are back.
            can_restore=self._snapshots is not None or not is_local,
            name=self._name,
            on_snapshot_error=options.on_snapshot_error,
        )
        self._manager: Manager | None = None
        self.servers: Servers | None = None
        try:
            if is_local:
                count = options.workers + options.servers
                threads = max(1, len(os.sched_getaffinity(0)) // options.workers)
                self._manager = Manager(
                    self._service.address,
                    environment(threads),
                    count,
                )
            self.dispatcher.start_all()
            self.dispatcher.wait_ready(options.start_seconds)
            self.servers = Servers(
                self._addresses,
                keys,
                options.timeout_seconds,
                self._name,
                check=self.dispatcher.raise_fatal,
            )
            everyone = dict.fromkeys(range(options.servers), self._name)
            self.servers.ask_all("begin", everyone)
        except BaseException:
            self.close()
            raise

    def _check_snapshots(self, folder: str) -> None:
        """Raises or warns before any process starts, if snapshots cannot be written."""
        try:
            check_folder(folder)
        except SnapshotError as error:
            if self.options.on_snapshot_error == "raise":
                raise
            warnings.warn(
                f"{error.text} Training continues without snapshots.", stacklevel=5
            )

    def _process(self, kind: str, index: int, incarnation: int) -> Start:
        common: dict[str, Any] = {
            "index": index,
            "incarnation": incarnation,
            "control": self._service.address,
            "keys": self._keys,
        }
        if kind == "ps":
            entry = f"{__name__}:server_process"
            common |= {
                "address": self._addresses[index],
                "snapshots": self._snapshots,
                "interval": self.options.snapshot_seconds,
            }
        else:
            entry = self._worker_entry
            common |= {
                "addresses": self._addresses,
                "timeout": self.options.timeout_seconds,
            }
        return Start(kind, index, incarnation, entry, common)

    def close(self) -> None:
        """Ends all processes; may be called again."""
        with self._close_lock:
            if self._is_closed:
                return
            self._is_closed = True
        self.dispatcher.close()
        if self._manager is not None:
            self._manager.close()
        elif self.servers is not None:
            # Whatever they answer, or that they are gone: the rest is closed, too.
            with contextlib.suppress(Exception):
                everyone = range(self.options.servers)
                self.servers.ask_all("stop", dict.fromkeys(everyone))
        if self.servers is not None:
            self.servers.close()
        self._service.close()
        self._folder.cleanup()
        if self._own_snapshots is not None:
            shutil.rmtree(self._own_snapshots, ignore_errors=True)


def server_process(
    index: int,
    incarnation: int,
    control: str,
    keys: Keys | None,
    address: str,
    snapshots: str | None,
    interval: float | None,
    patience: float = math.inf,
) -> None:
    """A parameter server's process.

    Args:
        index: int, its number.
        incarnation: int, counts the processes that have been this server.
        control: str, the coordinator's address.
        keys: `Keys` where addresses are not local.
        address: str, where it listens.
        snapshots: folder for snapshots, None for none.
        interval: float, seconds between snapshots; None for none by itself.
        patience: float, seconds that the coordinator may be gone.

    Raises:
        RuntimeError: `WorkerError` if the coordinator is gone for longer.
    """
    reasons: list[str] = []

    def ready(server: server_module.ParameterServer) -> None:
        restored = (server.is_restored, server.damage)
        value = (index, incarnation, os.getpid(), *restored)

        def lost(reason: str) -> None:
            reasons.append(reason)
            server.on_stop()

        start_beating(
            control,
            keys,
            ("ps", index),
            incarnation,
            lambda: ("server", value),
            lost,
            patience,
            server.notices,
        )

    server_module.main(index, address, keys, snapshots, interval, ready)
    if reasons:
        raise WorkerError(reasons[0])


def worker_process(
    index: int,
    incarnation: int,
    control: str,
    keys: Keys | None,
    addresses: list[str],
    timeout: float,
    make_strategy: Callable[[Worker], Any],
    patience: float = math.inf,
) -> None:
    """A worker's process.

    Args:
        index: int, its number.
        incarnation: int, counts the processes that have been this worker.
        control: str, the coordinator's address.
        keys: `Keys` where addresses are not local.
        addresses: list of str, the servers'.
        timeout: float, seconds that a server may take to answer.
        make_strategy: makes what `ks.get_strategy()` returns in closures.
        patience: float, seconds that the coordinator may be gone.
    """
    engine = get_engine()
    receiver = WorkerReceiver(engine)
    servers = Servers(addresses, keys, timeout)
    connection = Connection(control, keys, "the coordinator")
    worker = Worker(
        index, connection, Execution(servers, receiver, engine), incarnation, patience
    )
    receiver.set_strategy(make_strategy(worker))
    start_beating(control, keys, index, incarnation)
    try:
        worker.work()
    finally:
        servers.close()
        connection.close()
