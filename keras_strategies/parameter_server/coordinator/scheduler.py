"""Scheduler: assignment of tasks to workers, retries."""

from __future__ import annotations

import collections
import contextlib
import threading
import time
from typing import Any

from keras_strategies.errors import (
    ClosureCancelledError,
    ClusterTimeoutError,
    InvalidTypeError,
    SnapshotError,
    WorkerError,
)
from keras_strategies.parameter_server.coordinator.cluster_options import ClusterOptions
from keras_strategies.parameter_server.coordinator.cluster_processes import (
    EndCause,
    TaskProcesses,
)
from keras_strategies.parameter_server.coordinator.cluster_state import (
    MAX_OUTSIDE_ENDS,
    QueuedTask,
    WorkerState,
)
from keras_strategies.parameter_server.coordinator.process_supervisor import (
    ProcessSupervisor,
)
from keras_strategies.parameter_server.coordinator.task_queue import (
    END_OF_INPUT,
    TaskQueue,
)
from keras_strategies.parameter_server.variables.coordinator_variables import (
    CoordinatorVariables,
)
from keras_strategies.parameter_server.variables.object_pickling import load_result
from keras_strategies.parameter_server.wire.request_service import Service
from keras_strategies.parameter_server.wire.server_addresses import ServerAddresses
from keras_strategies.parameter_server.wire.task_messages import (
    FunctionDefinition,
    PickledResult,
    ReleasedNumbers,
    ScheduledTask,
    TaskResult,
    WorkerResource,
)
from keras_strategies.parameter_server.worker.pull_ahead import PULL_AHEAD_STEPS
from keras_strategies.text_tables import readable_bytes

#: Tasks of a worker, so that it does not wait for the next one. Of a model's steps one
#: awaits the servers' replies, one is computed, and the later ones are prefetched.
_TASKS_IN_FLIGHT = 2
_STEPS_IN_FLIGHT = 2 + PULL_AHEAD_STEPS
#: Number of workers that end by themselves during a task until it fails; of those that
#: may have been ended from outside `MAX_OUTSIDE_ENDS`, which this number warns of.
_FATAL_DEATHS = 3


class Scheduler:
    """Assigns tasks to workers, in a thread of its own.

    Args:
        service: receives the reports of workers and servers.
        options: `ClusterOptions`.
        processes: starts and kills workers and servers; None if they are started
            elsewhere.
        local: values of variables on no server.
        can_restore: bool, whether servers have snapshots.
        name: str, the coordinator's.
        addresses: `ServerAddresses`, changed when a server registers.
    """

    def __init__(
        self,
        service: Service,
        options: ClusterOptions,
        processes: TaskProcesses | None,
        local: CoordinatorVariables,
        can_restore: bool,
        name: str,
        addresses: ServerAddresses,
    ):
        self._service = service
        self._options = options
        self._local = local
        self.max_staleness = options.max_staleness
        self.tasks = TaskQueue(self._is_running)
        self.condition = self.tasks.condition
        self.supervisor = ProcessSupervisor(
            options, processes, can_restore, name, addresses, observer=self
        )
        self.workers = self.supervisor.workers
        self.servers = self.supervisor.servers
        #: Reason why snapshots cannot be written; None if they can.
        self.snapshot_problem: str | None = None
        self.done_steps = 0
        self._definitions: dict[int, FunctionDefinition] = {}
        self._resources: dict[int, WorkerResource] = {}
        # Names of functions that change their copies of objects.
        self._warned: set[str] = set()
        self._released_resources: collections.deque[int] = collections.deque()
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

    def release_resource(self, number: int) -> None:
        """Discards a value of each worker; from any thread, holding any lock."""
        self._released_resources.append(number)

    def release(self, released: ReleasedNumbers) -> None:
        """Discards released definitions here, and all released objects on workers."""
        with self.condition:
            for number in released.definitions:
                del self._definitions[number]
            for worker in self.workers.values():
                worker.known.difference_update(
                    ("definition", number) for number in released.definitions
                )
                if worker.sender is not None:
                    self.send(worker.sender, ("release", released))

    def schedule(self, task: QueuedTask) -> None:
        """Queues a task; blocks only while the queue is full."""
        self.tasks.add(task)
        with self.condition:
            # Busy workers receive it after their next result.
            waiting = self.tasks.waiting
            is_wanted = bool(waiting) and (
                _has_no_batch(waiting[0]) or bool(self._ready_workers())
            )
        if is_wanted:
            self._service.wake()

    def abandon(self) -> None:
        """Drops queued tasks and waits for running ones, without errors."""
        self.tasks.abandon(2 * self._options.silence_seconds)

    def raise_fatal(self) -> None:
        """Raises the fatal error, if there is one."""
        if self.tasks.fatal is not None and not self._is_closed:
            raise self.tasks.fatal

    def wait_ready(self, seconds: float) -> None:
        """Waits for all servers and at least one worker."""
        with self.condition:
            ready = self.condition.wait_for(
                lambda: self.tasks.fatal is not None or not self.supervisor.missing(),
                seconds,
            )
            if self.tasks.fatal is not None:
                raise self.tasks.fatal
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
                    self.send(worker.sender, ("stop", None))
            self.tasks.cancel(ClosureCancelledError("The strategy was closed."))
            self.tasks.fatal = self.tasks.fatal or WorkerError(
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
                if not self._is_closed:
                    self.supervisor.update_processes()
                self.supervisor.check_heartbeats()
                self._check_progress()
                self._release_resources()
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

    def _release_resources(self) -> None:
        """Discards values of workers that nothing on the coordinator refers to."""
        numbers: list[int] = []
        while self._released_resources:
            numbers.append(self._released_resources.popleft())
        if not numbers:
            return
        released = ReleasedNumbers((), (), (), tuple(numbers))
        for number in numbers:
            del self._resources[number]
        for worker in self.workers.values():
            worker.known.difference_update(("resource", number) for number in numbers)
            if worker.sender is not None:
                self.send(worker.sender, ("release", released))

    def send(self, receiver: bytes, message: Any) -> None:
        """Queues a message to a process."""
        self._to_send.append((receiver, message))

    def process_registered(self) -> None:
        self.condition.notify_all()

    def server_damaged(self, damage: str) -> None:
        self.tasks.warnings.append(damage)

    def worker_lost(self, worker: WorkerState, cause: EndCause) -> None:
        again = list(worker.in_flight)
        worker.in_flight.clear()
        for task in again:
            if task.pipelines is not None and not task.pipelines.is_exact:
                # Another worker reads the next batch of its own pipeline.
                task.place = None
        # Only the first one was running.
        if again and self.supervisor.is_evidence(cause):
            self._count_death(again[0], worker, cause)
            if again[0].deaths.is_final(_FATAL_DEATHS):
                failed = again.pop(0)
                self.tasks.fail(failed, self._repeated(failed, worker, cause))
        self.tasks.waiting.extendleft(reversed(again))
        self.condition.notify_all()

    def _count_death(
        self, pending: QueuedTask, worker: WorkerState, cause: EndCause
    ) -> None:
        pending.deaths.add(cause)
        if cause.is_from_outside and pending.deaths.outside == _FATAL_DEATHS:
            self.tasks.warnings.append(
                f"{_FATAL_DEATHS} workers in turn were lost while they ran "
                f"{self._name(pending)}, worker {worker.index} last: {cause.reason}. "
                "It runs again on the next free worker; its updates count once. After "
                f"{MAX_OUTSIDE_ENDS} workers it is an error."
            )

    def _repeated(
        self, pending: QueuedTask, worker: WorkerState, cause: EndCause
    ) -> BaseException:
        """The error of a task during which several workers died."""
        name = self._name(pending)
        reason, deaths = cause.reason, pending.deaths
        if deaths.own < _FATAL_DEATHS:
            return WorkerError(
                f"{deaths.total} workers in turn were lost while they ran one "
                f"scheduled function, {name}, worker {worker.index} last: {reason}. "
                "Either the function ends them, as by using more memory than the "
                "machine has (which SIGKILL often means): see their output, and use "
                "smaller batches or fewer workers for each machine. Or workers are "
                "preempted sooner than it finishes: schedule shorter functions."
            )
        if pending.timeouts:
            return ClusterTimeoutError(
                f"{deaths.own} workers in turn were ended because {name} did not "
                f"finish within {self._options.step_timeout_seconds:g} seconds, "
                f"worker {worker.index} last. If it needs longer, raise "
                "`step_timeout_seconds` of the strategy."
            )
        return WorkerError(
            f"{deaths.total} workers in turn died while they ran one scheduled "
            f"function, {name}, worker {worker.index} last: {reason}. See their "
            "output."
        )

    def _name(self, pending: QueuedTask) -> str:
        return self._definitions[pending.definition].name

    def _check_progress(self) -> None:
        """Ends workers without a result for `step_timeout_seconds`."""
        limit = self._options.step_timeout_seconds
        if limit is None:
            return
        now = time.monotonic()
        if not self.supervisor.are_servers_ready():
            # Steps wait for a server that is restarted.
            for worker in self.workers.values():
                worker.last_progress = now
        for worker in self.workers.values():
            seconds = now - worker.last_progress
            if worker.in_flight and seconds > limit:
                late = worker.in_flight[0]
                late.timeouts += 1
                reason = f"{self._name(late)} did not finish within {limit:g} seconds"
                if late.deaths.own + 1 < _FATAL_DEATHS:
                    self.tasks.warnings.append(
                        f"Worker {worker.index} was ended and is replaced: {reason}, "
                        "the `step_timeout_seconds` of the strategy. It runs again on "
                        "the next free worker; its updates count once."
                    )
                self.supervisor.end_worker(
                    worker, EndCause(reason, is_from_outside=False)
                )

    def _is_running(self) -> bool:
        """Whether a worker runs a task."""
        return any(worker.in_flight for worker in self.workers.values())

    def _assign(self) -> None:
        if self.tasks.fatal is not None:
            return
        waiting = self.tasks.waiting
        while waiting:
            if _has_no_batch(waiting[0]):
                self.tasks.finish(waiting.popleft(), END_OF_INPUT)
                self.condition.notify_all()
            elif ready := self._ready_workers():
                self._send_task(min(ready, key=self._load))
            else:
                break

    def _load(self, worker: WorkerState) -> tuple[int, int]:
        """Tasks of a worker, and batches that its pipeline has been read by."""
        pipelines = self.tasks.waiting[0].pipelines
        read = 0 if pipelines is None else pipelines.position(self._pipeline(worker))
        return len(worker.in_flight), read

    def _can_read(self, worker: WorkerState) -> bool:
        """Whether a worker can read the batches of the first task of the queue."""
        return self.tasks.waiting[0].pipelines is None or self._pipeline(worker) >= 0

    def _pipeline(self, worker: WorkerState) -> int:
        """The pipeline of a worker for the first task of the queue; -1 for none."""
        workers, task = self.workers, self.tasks.waiting[0]
        assert task.pipelines is not None, "it reads pipelines"

        def is_alive(index: int) -> bool:
            return index in workers and workers[index].is_alive

        return task.pipelines.of_worker(worker.index, is_alive, task.place)

    def _ready_workers(self) -> list[WorkerState]:
        """Workers that may receive the first task of the queue."""
        workers = [w for w in self.workers.values() if w.is_alive]
        if self.max_staleness is not None:
            in_flight = sum(len(w.in_flight) for w in self.workers.values())
            if in_flight > self.max_staleness:
                return []
        ahead = self._max_in_flight()
        return [w for w in workers if len(w.in_flight) < ahead and self._can_read(w)]

    def _max_in_flight(self) -> int:
        """Maximum number of tasks of a worker."""
        if self.max_staleness is not None:
            return 1
        kind = self._definitions[self.tasks.waiting[0].definition].kind
        return (
            _STEPS_IN_FLIGHT
            if self._options.pull_ahead and kind != "call"
            else _TASKS_IN_FLIGHT
        )

    def _send_task(self, worker: WorkerState) -> None:
        pending = self.tasks.waiting[0]
        arguments = pending.arguments
        if pending.pipelines is not None:
            if pending.place is None:
                pending.place = pending.pipelines.take(self._pipeline(worker))
            arguments = pending.pipelines.references(pending.place)
        self.tasks.waiting.popleft()
        assert worker.sender is not None
        for resource in self._resources.values():
            if ("resource", resource.number) not in worker.known:
                worker.known.add(("resource", resource.number))
                self.send(worker.sender, ("resource", resource))
        number = pending.definition
        if ("definition", number) not in worker.known:
            worker.known.add(("definition", number))
            definition = self._definitions[number]
            self.send(worker.sender, ("define", definition))
        task = ScheduledTask(
            pending.number,
            number,
            arguments,
            local={n: self._local.get(n) for n in pending.local},
            done=self.tasks.first_unfinished,
            generation=pending.generation,
            pulls_ahead=self._options.pull_ahead,
            variables=pending.variables,
            worker_values=pending.worker_values,
        )
        if not worker.in_flight:
            worker.last_progress = time.monotonic()
        worker.in_flight.append(pending)
        self.send(worker.sender, ("task", task))
        self.condition.notify_all()

    def _on_result(self, sender: bytes, result: TaskResult) -> None:
        for worker in self.workers.values():
            if worker.sender != sender:
                continue
            for pending in worker.in_flight:
                if pending.number == result.number:
                    worker.in_flight.remove(pending)
                    self._finish(worker, pending, result)
                    self.condition.notify_all()
                    return

    def _finish(
        self, worker: WorkerState, pending: QueuedTask, result: TaskResult
    ) -> None:
        worker.last_heartbeat = worker.last_progress = time.monotonic()
        if result.error is not None:
            self.tasks.fail(pending, result.error.error())
            return
        if pending.pipelines is not None and not result.steps:
            assert pending.place is not None, "it was assigned"
            pending.pipelines.end(pending.place[0])
            pending.place = None
            self.tasks.waiting.appendleft(pending)
            return
        value = result.value
        if isinstance(value, PickledResult):
            try:
                value = load_result(value)
            except InvalidTypeError as error:
                self.tasks.fail(pending, error)
                return
        self._warn_of_changes(pending, result)
        self._warn_of_full_tables(result)
        worker.steps += result.steps
        worker.seconds += result.seconds
        sent, received = result.traffic
        worker.sent_bytes += sent
        worker.received_bytes += received
        missed, most = result.staleness
        worker.staleness += missed
        worker.most_staleness = max(worker.most_staleness, most)
        self.done_steps += result.steps
        self._local.add(result.local)
        self.tasks.finish(pending, value)

    def _warn_of_changes(self, pending: QueuedTask, result: TaskResult) -> None:
        """Warns once for each function that changes a worker's copy of an object."""
        name = self._name(pending)
        if not result.changes or name in self._warned:
            return
        self._warned.add(name)
        self.tasks.warnings.append(
            f"{name} changed objects that it refers to: {', '.join(result.changes)}. "
            "Each worker has a copy of them, and the coordinator and other workers do "
            "not see what it changes. Return values instead, or store them in a "
            "`keras.Variable` of the scope."
        )

    def _warn_of_full_tables(self, result: TaskResult) -> None:
        """Warns once of each large table that each step sends in full."""
        for path, nbytes in result.full_tables.items():
            if path not in self._warned:
                self._warned.add(path)
                self.tasks.warnings.append(
                    f"All rows of {path!r}, {readable_bytes(nbytes)}, are sent to a "
                    "worker in each step: the step uses them beyond a lookup. Leave "
                    "out its regularizer, and a layer that is tied to "
                    "it, or regularize the rows that a batch looks up."
                )

    def snapshots_reported(self, problem: str | None) -> None:
        """Handles a server's snapshot problem; None after recovery."""
        tasks = self.tasks
        before, self.snapshot_problem = self.snapshot_problem, problem
        if problem is None:
            if isinstance(tasks.error, SnapshotError):
                tasks.error = None
        elif self._options.on_snapshot_error == "continue":
            if before is None:
                tasks.warnings.append(
                    f"{problem} Training continues without snapshots: if this server "
                    "dies, its updates since its last snapshot are lost."
                )
        elif tasks.error is None:
            tasks.error = SnapshotError(
                f"{problem} The variables are intact: save the model elsewhere, or "
                "free space and train on. `on_snapshot_error='continue'` of the "
                "strategy trains on without snapshots."
            )
            tasks.cancel(tasks.error)
            self.condition.notify_all()

    def failed(self, error: BaseException) -> None:
        """Fails all tasks with a fatal error."""
        if self.tasks.fatal is not None:
            return
        running = [p for w in self.workers.values() for p in w.in_flight]
        for worker in self.workers.values():
            worker.in_flight.clear()
        self.tasks.fail_all(running, error)


def _has_no_batch(task: QueuedTask) -> bool:
    """Whether no pipeline has a batch for a task."""
    return task.pipelines is not None and task.pipelines.have_ended(task.place)
