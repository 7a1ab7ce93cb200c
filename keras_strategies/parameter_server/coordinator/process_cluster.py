"""Start and end of a cluster's processes."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from keras_strategies.errors import SnapshotError
from keras_strategies.parameter_server.coordinator.cluster_options import ClusterOptions
from keras_strategies.parameter_server.coordinator.cluster_processes import (
    SHARED_GPU,
    ClusterProcesses,
    ProcessCall,
    TaskProcesses,
    environment,
    gpu_environment,
)
from keras_strategies.parameter_server.coordinator.scheduler import Scheduler
from keras_strategies.parameter_server.server.server_process import run_server
from keras_strategies.parameter_server.server.snapshots import check_folder
from keras_strategies.parameter_server.variables.coordinator_variables import (
    CoordinatorVariables,
)
from keras_strategies.parameter_server.wire.cluster_keys import Keys
from keras_strategies.parameter_server.wire.request_service import Service
from keras_strategies.parameter_server.wire.server_addresses import ServerAddresses
from keras_strategies.parameter_server.wire.server_connections import ServerConnections
from keras_strategies.parameter_server.worker.worker_process import run_worker
from keras_strategies.processes.local_cluster import LocalTask, visible_gpus
from keras_strategies.user_warnings import warn_user


class ProcessCluster:
    """The coordinator's connections, scheduler and processes.

    Args:
        options: `ClusterOptions`.
        control: str, the coordinator's address; None for a local cluster.
        addresses: list of str, the servers'; None for a local cluster.
        keys: `Keys` where addresses are not local.
        start_processes: called with `ProcessCluster.process_call`; returns the
            processes on other machines. None if they are started elsewhere.
    """

    def __init__(
        self,
        options: ClusterOptions,
        control: str | None = None,
        addresses: list[str] | None = None,
        keys: Keys | None = None,
        start_processes: Callable[[Callable[[LocalTask], ProcessCall]], TaskProcesses]
        | None = None,
    ):
        self.options = options
        self._is_closed = False
        self._close_lock = threading.Lock()
        self._folder = _private_folder()
        folder = Path(self._folder.name)
        is_local = control is None
        self._is_local = is_local
        self._gpus = visible_gpus(os.environ) if is_local else []
        self._keys = keys
        self._addresses = ServerAddresses(
            addresses or [self._address(i) for i in range(options.servers)]
        )
        self._snapshots = options.snapshot_folder
        self._own_snapshots: str | None = None
        if options.snapshot_seconds is not None and self._snapshots is None:
            self._own_snapshots = tempfile.mkdtemp(prefix="ks-snapshots-")
            self._snapshots = self._own_snapshots
        if self._snapshots is not None and is_local:
            self._check_snapshots(self._snapshots)
        #: str, the name of the coordinator among the servers.
        self.name = secrets.token_hex(8)
        self._service = Service(control or f"ipc://{folder}/control", keys)
        self._processes: TaskProcesses | None = None
        if is_local:
            threads = max(1, len(os.sched_getaffinity(0)) // options.workers)
            shared = SHARED_GPU if options.workers > len(self._gpus) else {}
            self._processes = ClusterProcesses(
                self.process_call, environment(threads, {**shared, **os.environ})
            )
        elif start_processes is not None:
            try:
                self._processes = start_processes(self.process_call)
            except BaseException:
                self._service.close()
                self._folder.cleanup()
                raise
        self.local = CoordinatorVariables()
        self.scheduler = Scheduler(
            self._service,
            options,
            self._processes,
            self.local,
            # A server that was started elsewhere reports whether it was restored.
            can_restore=self._snapshots is not None or self._processes is None,
            name=self.name,
            addresses=self._addresses,
        )
        self.servers: ServerConnections | None = None
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        """Starts the processes, and assigns the servers to this coordinator."""
        self.scheduler.start_all()
        self.scheduler.wait_ready(self.options.start_seconds)
        self.servers = ServerConnections(
            self._addresses,
            self._keys,
            self.options.timeout_seconds,
            self.name,
            check=self.scheduler.raise_fatal,
        )
        owners = dict.fromkeys(range(self.options.servers), self.name)
        self.servers.request_all("begin", owners)

    def _check_snapshots(self, folder: str) -> None:
        """Raises or warns before a process starts if snapshots cannot be written."""
        try:
            check_folder(folder)
        except SnapshotError as error:
            if self.options.on_snapshot_error == "raise":
                raise
            warn_user(f"{error.text} Training continues without snapshots.")

    def _address(self, server: int) -> str:
        """Where a server listens; `""` for a free port of another machine."""
        return "" if not self._is_local else f"ipc://{self._folder.name}/ps-{server}"

    @property
    def starts_processes(self) -> bool:
        """Whether this object starts the workers and servers."""
        return self._processes is not None

    def process_call(self, task: LocalTask) -> ProcessCall:
        """The function that a process of a task calls."""
        common: dict[str, Any] = {
            "index": task.index,
            "incarnation": task.incarnation,
            "control": self._service.address,
            "keys": self._keys,
        }
        entry: Callable[..., None]
        if task.job == "ps":
            entry = run_server
            common |= {
                "address": self._address(task.index),
                "snapshots": self._snapshots,
                "interval": self.options.snapshot_seconds,
            }
        else:
            entry = run_worker
            common |= {
                "addresses": self._addresses.state[1],
                "timeout": self.options.timeout_seconds,
            }
        gpus = gpu_environment(task, self._gpus)
        return ProcessCall(f"{entry.__module__}:{entry.__name__}", common, gpus)

    def close(self) -> None:
        """Ends all processes; may be called repeatedly."""
        with self._close_lock:
            if self._is_closed:
                return
            self._is_closed = True
        self.scheduler.close()
        if self._processes is not None:
            self._processes.close()
        elif self.servers is not None:
            # Errors of servers must not prevent closing the rest.
            with contextlib.suppress(Exception):
                numbers = range(len(self.servers))
                self.servers.request_all("stop", dict.fromkeys(numbers))
        if self.servers is not None:
            self.servers.close()
        self._service.close()
        self._folder.cleanup()
        if self._own_snapshots is not None:
            shutil.rmtree(self._own_snapshots, ignore_errors=True)


def _private_folder() -> tempfile.TemporaryDirectory[str]:
    """A folder for this user only, with a path short enough for sockets."""
    root = Path(tempfile.gettempdir())
    # Paths of Unix sockets have 107 characters at most.
    return tempfile.TemporaryDirectory(
        prefix="ks-", dir=root if len(str(root)) < 60 else "/tmp"
    )
