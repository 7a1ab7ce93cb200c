"""Scheduler: task queue, assignment to workers, retries."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable
from typing import Any

from keras_strategies.errors import (
    ClosureCancelledError,
    ClusterTimeoutError,
    SnapshotError,
    WorkerError,
)
from keras_strategies.parameter_server.coordinator.cluster_state import (
    QueuedTask,
    WorkerState,
)
from keras_strategies.parameter_server.coordinator.process_supervisor import (
    ProcessSupervisor,
)
from keras_strategies.parameter_server.coordinator.ray_launcher import (
    ProcessStart,
    wait_for,
)
from keras_strategies.parameter_server.variables.coordinator_variables import (
    CoordinatorVariables,
)
from keras_strategies.parameter_server.wire.task_messages import (
    FunctionDefinition,
    ScheduledTask,
    TaskResult,
    WorkerResource,
)
from keras_strategies.parameter_server.wire.transport import Service
from keras_strategies.parameter_server.worker.pull_ahead import PULL_AHEAD_STEPS
from keras_strategies.user_warnings import warn_user

#: Tasks of a worker, so that it does not wait for the next one. Of a model's steps one
#: awaits the servers' replies, one is computed, and the later ones are prefetched.
_TASKS_IN_FLIGHT = 2
_STEPS_IN_FLIGHT = 2 + PULL_AHEAD_STEPS
#: Number of workers that die during a task until it fails.
_FATAL_DEATHS = 3


class Scheduler:
    """Assigns tasks to workers, in a thread of its own.

    Args:
        service: where workers, servers and the manager report.
        workers: int, initial number of workers.
        servers: int, number of servers.
        make_start: callable of a kind, an index and an incarnation that returns a
            `ProcessStart`; None if the processes are started elsewhere.
        local: values of variables on no server.
        max_staleness: int or None, see `ParameterServerStrategy`.
        pulls_ahead: bool, whether workers pull values two steps ahead.
        silence: float, seconds without a heartbeat after which a process is lost.
        can_restore: bool, whether servers have snapshots.
        name: str, the coordinator's.
        on_snapshot_error: str, `"raise"` or `"continue"`.
    """

    def __init__(
        self,
        service: Service,
        workers: int,
        servers: int,
        make_start: Callable[[str, int, int], ProcessStart] | None,
        local: CoordinatorVariables,
        max_staleness: int | None,
        pulls_ahead: bool,
        silence: float,
        can_restore: bool,
        name: str,
        on_snapshot_error: str = "raise",
    ):
        self._service = service
        self._on_snapshot_error = on_snapshot_error
        # For the user's thread, which emits them.
        self._warnings: collections.deque[str] = collections.deque()
        self._local = local
        self._silence = silence
        self.max_staleness = max_staleness
        self._pulls_ahead = pulls_ahead
        self.condition = threading.Condition()
        self.supervisor = ProcessSupervisor(
            workers,
            servers,
            make_start,
            silence,
            can_restore,
            name,
            send=lambda receiver, message: self._to_send.append((receiver, message)),
            on_lost=self._worker_lost,
            on_failure=self._fail_all,
            on_change=self.condition.notify_all,
            on_damage=self._warnings.append,
            on_snapshots=self._on_snapshots,
        )
        self.workers = self.supervisor.workers
        self.servers = self.supervisor.servers
        self.queue: collections.deque[QueuedTask] = collections.deque()
        self.max_queued = 256
        self.error: BaseException | None = None
        self.fatal: BaseException | None = None
        #: Reason why snapshots cannot be written; None if they can.
        self.snapshot_problem: str | None = None
        self.done_steps = 0
        self._definitions: dict[int, FunctionDefinition] = {}
        self._resources: dict[int, WorkerResource] = {}
        self._unfinished: set[int] = set()
        self._next_task = 0
        self._to_send: collections.deque[tuple[bytes, Any]] = collections.deque()
        self._is_closed = False
        self._thread = threading.Thread(
            target=self._work, name="coordinator", daemon=True
        )
        self._thread.start()

    # Called in the user's threads

    def define(self, definition: FunctionDefinition) -> None:
        with self.condition:
            self._definitions[definition.number] = definition

    def add_resource(self, resource: WorkerResource) -> None:
        with self.condition:
            self._resources[resource.number] = resource

    def schedule(
        self,
        definition: int,
        arguments: Any,
        generation: int,
        result: Callable[[Any, BaseException | None], None],
        local: tuple[int, ...],
    ) -> None:
        """Queues a task; blocks only while the queue is full."""
        self._emit_warnings()
        with self.condition:
            self.condition.wait_for(
                lambda: len(self.queue) < self.max_queued or self._is_broken()
            )
            self.raise_error()
            number = self._next_task
            self._next_task += 1
            self._unfinished.add(number)
            task = ScheduledTask(number, definition, arguments, generation=generation)
            self.queue.append(QueuedTask(task, result, local))
            # Busy workers receive it after their next result.
            is_wanted = bool(self._ready_workers())
        if is_wanted:
            self._service.wake()

    def wait_for_room(self, is_known: Callable[[], bool]) -> bool:
        """Waits until a task is finished, or until the queue is empty.

        Args:
            is_known: whether the task is finished.

        Returns:
            Whether it is finished.
        """
        with self.condition:
            self.condition.wait_for(
                lambda: is_known() or not self.queue or self._is_broken()
            )
        return is_known()

    def wait_until_done(self, timeout: float | None = None) -> None:
        """Waits for all tasks; raises the first error."""
        with self.condition:
            finished = self.condition.wait_for(
                lambda: not self._unfinished or self.fatal is not None, timeout
            )
            self._emit_warnings()
            self.raise_error()
            if not finished:
                raise ClusterTimeoutError(
                    f"{len(self._unfinished)} scheduled functions had not finished "
                    f"after {timeout:g} seconds."
                )

    def abandon(self) -> None:
        """Drops queued tasks and waits for running ones, without errors."""
        with self.condition:
            self._cancel(ClosureCancelledError("Training ended before this step."))
            self.condition.wait_for(
                lambda: (
                    not any(w.in_flight for w in self.workers.values())
                    or self.fatal is not None
                ),
                self._silence * 2,
            )
            self.error = None

    def discard_error(self, error: BaseException) -> None:
        """Discards an error that the caller has raised."""
        with self.condition:
            if self.error is error:
                self.error = None

    def is_done(self) -> bool:
        with self.condition:
            self.raise_error()
            return not self._unfinished

    def raise_error(self) -> None:
        """Raises the first error of a task, once; a fatal one always."""
        with self.condition:
            if self.fatal is not None:
                raise self.fatal
            if self.error is None:
                return
            # Running tasks still count; none is left when this returns.
            self.condition.wait_for(
                lambda: (
                    not any(w.in_flight for w in self.workers.values())
                    or self.fatal is not None
                )
            )
            error, self.error = self.error, None
            if error is not None:
                raise error

    def raise_fatal(self) -> None:
        """Raises the fatal error, if there is one."""
        if self.fatal is not None and not self._is_closed:
            raise self.fatal

    def _emit_warnings(self) -> None:
        while self._warnings:
            warn_user(self._warnings.popleft())

    def _is_broken(self) -> bool:
        return self.error is not None or self.fatal is not None

    def wait_ready(self, seconds: float) -> None:
        """Waits for all servers and at least one worker."""
        with self.condition:
            ready = wait_for(
                self.condition,
                lambda: self.fatal is not None or not self.supervisor.missing(),
                seconds,
            )
            if self.fatal is not None:
                raise self.fatal
            if not ready:
                raise ClusterTimeoutError(
                    f"The cluster was not ready after {seconds:g} seconds: "
                    f"{', '.join(self.supervisor.missing())} did not report. See their "
                    "output, or raise `start_seconds` of the strategy."
                )

    def start_all(self) -> None:
        """Starts the processes, unless they are started elsewhere."""
        with self.condition:
            self.supervisor.start_all()
        self._service.wake()

    def add_worker(self) -> int:
        """Starts another worker; returns its number."""
        with self.condition:
            index = self.supervisor.add_worker()
        self._service.wake()
        return index

    def close(self) -> None:
        """Stops the workers and ends the thread."""
        with self.condition:
            self._is_closed = True
            for worker in self.workers.values():
                if worker.sender is not None:
                    self._to_send.append((worker.sender, ("stop", None)))
            self._cancel(ClosureCancelledError("The strategy was closed."))
            self.fatal = self.fatal or WorkerError(
                "The cluster of this strategy has been closed."
            )
            self.condition.notify_all()
        self._service.wake()
        self._thread.join(10.0)

    # The thread

    def _work(self) -> None:
        while True:
            received = self._service.receive(0.1)
            with self.condition:
                if received is not None:
                    sender, (_, (kind, value)) = received
                    if kind == "result":
                        self._on_result(sender, value)
                    elif not self._is_closed:
                        self.supervisor.handle(kind, sender, value)
                self.supervisor.check_heartbeats()
                self._assign()
                to_send, self._to_send = self._to_send, collections.deque()
                is_closed = self._is_closed
            for receiver, message in to_send:
                # An error of one peer must not end the thread. A lost one is detected
                # by its missing heartbeats.
                with contextlib.suppress(Exception):
                    self._service.send(receiver, (0, message))
            if is_closed:
                return

    def _worker_lost(self, worker: WorkerState, reason: str) -> None:
        again = list(worker.in_flight)
        worker.in_flight.clear()
        for i, pending in enumerate(again):
            # Only the first one was running.
            pending.deaths += i == 0
            if pending.deaths >= _FATAL_DEATHS:
                self._fail(
                    pending,
                    WorkerError(
                        f"{pending.deaths} workers in turn died while they ran one "
                        f"scheduled function, worker {worker.index} last: {reason}. "
                        "See their output. A process without an error there may have "
                        "been killed because the machine ran out of memory."
                    ),
                )
        alive = [p for p in again if p.deaths < _FATAL_DEATHS]
        self.queue.extendleft(reversed(alive))
        self.condition.notify_all()

    def _assign(self) -> None:
        if self.fatal is not None:
            return
        while self.queue and (ready := self._ready_workers()):
            self._send_task(min(ready, key=lambda w: len(w.in_flight)))

    def _ready_workers(self) -> list[WorkerState]:
        """Workers that may receive the first task of the queue."""
        workers = [w for w in self.workers.values() if w.is_alive]
        if self.max_staleness is not None:
            in_flight = sum(len(w.in_flight) for w in self.workers.values())
            if in_flight > self.max_staleness:
                return []
        ahead = self._max_in_flight()
        return [w for w in workers if len(w.in_flight) < ahead]

    def _max_in_flight(self) -> int:
        """Maximum number of tasks of a worker."""
        if self.max_staleness is not None:
            return 1
        kind = self._definitions[self.queue[0].task.definition].kind
        return (
            _STEPS_IN_FLIGHT
            if self._pulls_ahead and kind != "call"
            else _TASKS_IN_FLIGHT
        )

    def _send_task(self, worker: WorkerState) -> None:
        pending = self.queue.popleft()
        assert worker.sender is not None
        for resource in self._resources.values():
            if ("resource", resource.number) not in worker.known:
                worker.known.add(("resource", resource.number))
                self._to_send.append((worker.sender, ("resource", resource)))
        number = pending.task.definition
        if ("definition", number) not in worker.known:
            worker.known.add(("definition", number))
            definition = self._definitions[number]
            self._to_send.append((worker.sender, ("define", definition)))
        task = dataclasses.replace(
            pending.task,
            local={n: self._local.get(n) for n in pending.local},
            done=min(self._unfinished),
            pulls_ahead=self._pulls_ahead,
        )
        worker.in_flight.append(pending)
        self._to_send.append((worker.sender, ("task", task)))
        self.condition.notify_all()

    def _on_result(self, sender: bytes, result: TaskResult) -> None:
        for worker in self.workers.values():
            if worker.sender != sender:
                continue
            for pending in worker.in_flight:
                if pending.task.number == result.number:
                    worker.in_flight.remove(pending)
                    self._finish(worker, pending, result)
                    self.condition.notify_all()
                    return

    def _finish(
        self, worker: WorkerState, pending: QueuedTask, result: TaskResult
    ) -> None:
        worker.last_heartbeat = time.monotonic()
        if result.error is not None:
            self._fail(pending, result.error)
            return
        worker.steps += result.steps
        worker.seconds += result.seconds
        sent, received = result.traffic
        worker.sent_bytes += sent
        worker.received_bytes += received
        missed, most = result.staleness
        worker.staleness += missed
        worker.most_staleness = max(worker.most_staleness, most)
        self.done_steps += result.steps
        self._unfinished.discard(pending.task.number)
        self._local.add(result.local)
        pending.result(result.value, None)

    def _fail(self, pending: QueuedTask, error: BaseException) -> None:
        self._unfinished.discard(pending.task.number)
        pending.result(None, error)
        if self.error is None:
            self.error = error
            self._cancel(
                ClosureCancelledError(
                    "This function was cancelled because one that was scheduled "
                    f"before it failed: {type(error).__name__}: {error}"
                )
            )

    def _cancel(self, error: BaseException) -> None:
        while self.queue:
            pending = self.queue.popleft()
            self._unfinished.discard(pending.task.number)
            pending.result(None, error)

    def _on_snapshots(self, problem: str | None) -> None:
        """Handles a server's snapshot problem; None after recovery."""
        before, self.snapshot_problem = self.snapshot_problem, problem
        if problem is None:
            if isinstance(self.error, SnapshotError):
                self.error = None
        elif self._on_snapshot_error == "continue":
            if before is None:
                self._warnings.append(
                    f"{problem} Training continues without snapshots: if this server "
                    "dies, its updates since its last snapshot are lost."
                )
        elif self.error is None:
            self.error = SnapshotError(
                f"{problem} The variables are intact: save the model elsewhere, or "
                "free space and train on. `on_snapshot_error='continue'` of the "
                "strategy trains on without snapshots."
            )
            self._cancel(self.error)
            self.condition.notify_all()

    def _fail_all(self, error: BaseException) -> None:
        """Fails all tasks with a fatal error."""
        if self.fatal is not None:
            return
        self.fatal = error
        self._cancel(error)
        for worker in self.workers.values():
            for pending in worker.in_flight:
                self._unfinished.discard(pending.task.number)
                pending.result(None, error)
            worker.in_flight.clear()
        self.condition.notify_all()
