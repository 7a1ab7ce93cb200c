"""Process supervisor: liveness of workers and servers, and restarts."""

from __future__ import annotations

import collections
import time
from typing import Any, Protocol

from keras_strategies.cluster.startup_report import Progress
from keras_strategies.errors import ServerLostError, WorkerError
from keras_strategies.parameter_server.coordinator.cluster_options import ClusterOptions
from keras_strategies.parameter_server.coordinator.cluster_processes import (
    EndCause,
    TaskProcesses,
)
from keras_strategies.parameter_server.coordinator.cluster_state import (
    EndCount,
    ServerState,
    WorkerState,
)
from keras_strategies.parameter_server.wire.server_addresses import ServerAddresses
from keras_strategies.processes.local_cluster import LocalTask
from keras_strategies.text_tables import counted

#: Number of failed starts in a row after which a process is not restarted.
_MAX_FAILED_STARTS = 4


class SupervisorObserver(Protocol):
    """What a `ProcessSupervisor` reports to."""

    def send(self, receiver: bytes, message: Any) -> None:
        """Sends a message to a process."""

    def process_registered(self) -> None:
        """A process is ready."""

    def worker_lost(self, worker: WorkerState, cause: EndCause) -> None:
        """A worker has ended or is silent."""

    def server_damaged(self, damage: str) -> None:
        """A server was restored from damaged files."""

    def snapshots_reported(self, problem: str | None) -> None:
        """A server cannot write snapshots, or, with None, can again."""

    def failed(self, error: BaseException) -> None:
        """The cluster has ended with an error."""


class ProcessSupervisor:
    """Tracks and restarts workers and servers, in the scheduler's thread.

    Args:
        options: `ClusterOptions`.
        processes: starts and kills workers and servers; None if they are started
            elsewhere.
        can_restore: bool, whether servers have snapshots.
        name: str, the coordinator's.
        addresses: `ServerAddresses`, changed when a server registers.
        observer: `SupervisorObserver`.
    """

    def __init__(
        self,
        options: ClusterOptions,
        processes: TaskProcesses | None,
        can_restore: bool,
        name: str,
        addresses: ServerAddresses,
        observer: SupervisorObserver,
    ):
        self.workers = {i: WorkerState(i) for i in range(options.workers)}
        self.servers = {i: ServerState(i) for i in range(options.servers)}
        self._processes = processes
        self._silence = options.silence_seconds
        self._can_restore = can_restore
        self._name = name
        self._addresses = addresses
        self._observer = observer
        self._to_start: collections.deque[LocalTask] = collections.deque()
        self._progress = Progress()
        self._checked_at = time.monotonic()

    def handle(self, kind: str, sender: bytes, value: Any) -> None:
        """Handles a message of a process."""
        getattr(self, f"_on_{kind}")(sender, value)

    def start_all(self) -> None:
        """Queues the start of all processes for `update_processes`."""
        who = (
            f"{counted(len(self.workers), 'worker')} and "
            f"{counted(len(self.servers), 'parameter server')}"
        )
        what = "waiting for" if self._processes is None else "starting"
        self._progress.report(f"{what} {who}")
        for server in self.servers.values():
            self._start("ps", server.index, server.incarnation)
        for worker in self.workers.values():
            self._start("worker", worker.index, worker.incarnation)

    def add_worker(self) -> int:
        """Queues the start of another worker; returns its number."""
        index = max(self.workers) + 1
        self.workers[index] = WorkerState(index)
        self._start("worker", index, 0)
        return index

    def missing(self) -> list[str]:
        """Names of the processes that have not registered."""
        missing = [
            f"parameter server {s.index}"
            for s in self.servers.values()
            if not s.is_ready
        ]
        if not any(w.is_alive for w in self.workers.values()):
            missing += [f"worker {i}" for i in self.workers]
        return missing

    def are_servers_ready(self) -> bool:
        """Whether no server is being restarted, for which steps wait."""
        return all(server.is_ready for server in self.servers.values())

    def is_evidence(self, cause: EndCause) -> bool:
        """Whether a worker's end may be the fault of what it ran.

        Workers that are ended from outside while they wait for a server ran nothing.
        """
        return not cause.is_from_outside or self.are_servers_ready()

    def _lost(self, worker: WorkerState, cause: EndCause) -> None:
        worker.deaths += 1
        if worker.steps:
            worker.failed_starts = EndCount()
        elif self.is_evidence(cause):
            worker.failed_starts.add(cause)
        worker.sender = None
        self._observer.worker_lost(worker, cause)

    def _start(self, kind: str, index: int, incarnation: int) -> None:
        if self._processes is not None:
            self._to_start.append(LocalTask(kind, index, incarnation))

    def _kill(self, kind: str, index: int, incarnation: int) -> None:
        if self._processes is not None:
            self._processes.kill(LocalTask(kind, index, incarnation))

    def update_processes(self) -> None:
        """Starts queued processes and handles the ends of others.

        Called in the scheduler's thread, since the processes end with their starter.
        """
        if self._processes is None:
            return
        while self._to_start:
            task = self._to_start.popleft()
            try:
                self._processes.start(task)
            except OSError as error:
                self._observer.failed(
                    WorkerError(f"The process of {task} cannot be started: {error}")
                )
        for task, cause in self._processes.ended():
            self._on_end(task, cause)

    def _on_worker(self, sender: bytes, value: tuple[int, int, int, str]) -> None:
        index, incarnation, pid, device = value
        worker = self.workers.setdefault(index, WorkerState(index))
        if self._processes is None and worker.is_alive:
            # A process that was started elsewhere has restarted.
            self._lost(worker, EndCause("it was restarted", is_from_outside=True))
            worker.incarnation = incarnation
        if incarnation < worker.incarnation and self._processes is not None:
            return
        worker.sender, worker.pid, worker.device = sender, pid, device
        worker.incarnation = incarnation
        worker.last_heartbeat = time.monotonic()
        worker.known = set()
        self._observer.send(sender, ("registered", self._name))
        ready, total = sum(w.is_alive for w in self.workers.values()), len(self.workers)
        self._progress.report(f"worker {index} is ready, {ready} of {total}")
        self._observer.process_registered()

    def _on_server(
        self, sender: bytes, value: tuple[int, int, int, bool, str, str]
    ) -> None:
        index, incarnation, pid, is_restored, damage, address = value
        server = self.servers.get(index)
        if server is None:
            return
        if incarnation < server.incarnation and self._processes is not None:
            return
        self._addresses.set(index, address)
        is_restart = server.pid not in (0, pid)
        server.pid, server.incarnation = pid, incarnation
        is_new = is_restart or not server.is_ready
        server.is_ready = True
        if is_new:
            ready = sum(s.is_ready for s in self.servers.values())
            self._progress.report(
                f"parameter server {index} is ready, {ready} of {len(self.servers)}"
            )
        server.failed_starts = EndCount()
        server.last_heartbeat = time.monotonic()
        if is_restart and not is_restored:
            reason = damage or "There was no snapshot to restore."
            self._fail(f"Parameter server {index} died and was restarted. {reason}")
        elif is_restart and damage:
            self._observer.server_damaged(damage)
        self._observer.process_registered()

    def _on_snapshots(self, sender: bytes, value: tuple[int, str | None, bool]) -> None:
        index, problem, is_restorable = value
        if index in self.servers:
            self.servers[index].unsaved = "" if is_restorable else problem or ""
            self._observer.snapshots_reported(problem)

    def _on_memory(self, sender: bytes, value: tuple[int, int]) -> None:
        index, resident = value
        if index in self.servers:
            self.servers[index].resident_bytes = resident

    def _on_heartbeat(self, sender: bytes, value: tuple[Any, int, int | None]) -> None:
        name, incarnation, version = value
        if version not in (None, self._addresses.version):
            self._observer.send(sender, ("addresses", self._addresses.state))
        state: WorkerState | ServerState | None
        if isinstance(name, tuple):
            state = self.servers.get(name[1])
        else:
            state = worker = self.workers.get(name)
            if worker is not None:
                worker.heartbeat_sender = sender
        if state is not None and state.incarnation == incarnation:
            state.last_heartbeat = time.monotonic()

    def _on_end(self, task: LocalTask, cause: EndCause) -> None:
        if task.job == "worker":
            worker = self.workers[task.index]
            if worker.incarnation == task.incarnation:
                self._lost(worker, cause)
                self._restart(worker, cause.reason)
        elif task.index in self.servers:
            server = self.servers[task.index]
            if server.incarnation == task.incarnation:
                self._server_died(server, cause)

    def end_worker(self, worker: WorkerState, cause: EndCause) -> None:
        """Ends a worker's process and starts another one."""
        if self._processes is not None:
            self._kill("worker", worker.index, worker.incarnation)
        elif worker.heartbeat_sender is not None:
            self._observer.send(worker.heartbeat_sender, ("end", cause.reason))
        self._lost(worker, cause)
        self._restart(worker, cause.reason)

    def _restart(self, worker: WorkerState, reason: str) -> None:
        if worker.failed_starts.is_final(_MAX_FAILED_STARTS):
            worker.is_abandoned = True
            if all(w.is_abandoned for w in self.workers.values()):
                self._observer.failed(
                    WorkerError(
                        f"No worker could be started: worker {worker.index} exited "
                        f"{worker.failed_starts.total} times before its first step, "
                        f"last with: {reason}"
                    )
                )
            return
        worker.incarnation += 1
        self._start("worker", worker.index, worker.incarnation)

    def _server_died(self, server: ServerState, cause: EndCause) -> None:
        reason = cause.reason
        server.deaths += 1
        if not server.is_ready:
            server.failed_starts.add(cause)
        server.is_ready = False
        if not self._can_restore:
            self._fail(f"Parameter server {server.index} died: {reason}.")
            return
        if server.unsaved:
            self._fail(
                f"Parameter server {server.index} died: {reason}. Its snapshots are "
                f"incomplete: {server.unsaved}"
            )
            return
        if server.failed_starts.is_final(_MAX_FAILED_STARTS):
            self._fail(
                f"Parameter server {server.index} exited {server.failed_starts.total} "
                f"times before it was ready: {reason}."
            )
            return
        server.incarnation += 1
        self._start("ps", server.index, server.incarnation)

    def _fail(self, what: str) -> None:
        advice = "Create a new strategy and resume from a checkpoint."
        if not self._can_restore:
            advice = (
                "Create a new strategy and resume from a checkpoint; with "
                "`snapshot_seconds`, a server is restored from its last snapshot."
            )
        self._observer.failed(
            ServerLostError(f"{what} Its variables are lost. {advice}")
        )

    def check_heartbeats(self) -> None:
        """Kills and restarts processes without recent heartbeats."""
        now = time.monotonic()
        silent = f"no heartbeat for {self._silence:g} seconds"
        cause = EndCause(silent, is_from_outside=True)
        previous, self._checked_at = self._checked_at, now
        if now - previous > self._silence / 4:
            # This process was suspended: received heartbeats may be unread.
            states: list[WorkerState | ServerState] = [*self.workers.values()]
            for state in [*states, *self.servers.values()]:
                state.last_heartbeat = now
            for worker in self.workers.values():
                worker.last_progress = now
        for worker in self.workers.values():
            if worker.is_alive and now - worker.last_heartbeat > self._silence:
                self.end_worker(worker, cause)
        for server in self.servers.values():
            if server.is_ready and now - server.last_heartbeat > self._silence:
                self._kill("ps", server.index, server.incarnation)
                self._server_died(server, cause)
