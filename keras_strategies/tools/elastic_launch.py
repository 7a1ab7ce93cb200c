"""`keras-strategies launch --elastic`: workers with restarts after failures."""

from __future__ import annotations

import dataclasses
import os
import queue
import signal
import time
from collections.abc import Sequence

from keras_strategies.cluster.environment import ELASTIC
from keras_strategies.processes.launched_lead import launched_lead
from keras_strategies.processes.launcher import (
    Ended,
    Events,
    ProcessLauncher,
    Signalled,
    signals_as_events,
)
from keras_strategies.processes.local_cluster import LocalCluster, LocalTask
from keras_strategies.tools.tracebacks import print_line, print_tracebacks

#: Default number of restarts of a task.
DEFAULT_RESTARTS = 3
# The restarts of a task that has run for so many seconds are counted from 0 again.
_STABLE_SECONDS = 600.0
# Seconds before the first restart of a task, twice as many before each further one.
_FIRST_DELAY = 1.0
_LONGEST_DELAY = 30.0


def launch_elastic(
    workers: LocalCluster,
    command: Sequence[str],
    min_workers: int,
    max_restarts: int = DEFAULT_RESTARTS,
    grace_seconds: float = 10.0,
) -> int:
    """Runs a command as every worker, restarts failed ones, until training ends.

    Training has ended when a worker has exited with code 0. From then on no worker is
    restarted, and restarted ones, which may be too late to take part, get the grace
    period.

    Args:
        workers: the workers; their addresses stay the same.
        command: list of str, the program and its arguments.
        min_workers: int, if fewer are left, they are ended.
        max_restarts: int, restarts of each worker in ten minutes.
        grace_seconds: float, seconds that workers get to end before they are killed.

    Returns:
        int, 0, or the exit code of the worker whose failure has ended training; 128 + n
        after signal n.
    """
    events: Events = queue.SimpleQueue()
    outer = {**os.environ, ELASTIC: f"{min_workers}:{workers.workers}"}
    with (
        signals_as_events(events),
        launched_lead(workers.environments(outer)) as environments,
        ProcessLauncher(events, grace_seconds, holds_tracebacks=True) as processes,
    ):
        every = {t.index: _Worker(t, given) for t, given in environments.items()}
        options = min_workers, max_restarts, grace_seconds
        run = _ElasticRun(processes, command, every, *options)
        code = run.run()
    run.print_tracebacks()
    return 128 + processes.signalled.number if processes.signalled else code


@dataclasses.dataclass
class _Worker:
    """One worker and its restarts."""

    task: LocalTask
    environment: dict[str, str]
    begin: float = 0.0
    restarts: int = 0
    # Time of its next start; None while it runs or if it has ended.
    due: float | None = None
    is_running: bool = False

    @property
    def is_left(self) -> bool:
        """Whether it runs or will be started again."""
        return self.is_running or self.due is not None


@dataclasses.dataclass
class _ElasticRun:
    """The workers from the first start to the end of training."""

    processes: ProcessLauncher
    command: Sequence[str]
    workers: dict[int, _Worker]
    min_workers: int
    max_restarts: int
    grace_seconds: float
    # Time of the first exit with code 0.
    _done: float | None = None
    # The last failure before too few workers were left, and what has caused it.
    _failed: Ended | None = None
    _first: Ended | None = None
    # Errors with a printed traceback.
    _printed: set[str] = dataclasses.field(default_factory=set)

    def run(self) -> int:
        """Runs the workers; returns the exit code."""
        for worker in self.workers.values():
            self._start(worker)
        while self._is_going_on():
            event = self.processes.next_event(self._timeout())
            if isinstance(event, Signalled):
                name = signal.Signals(event.number).name
                print_line(f"{name}: ending all tasks.")
                self.processes.end(event.number)
                break
            if isinstance(event, Ended):
                self._ended(event)
            self._start_due()
        if self._done is not None or self.processes.signalled or self._failed is None:
            return 0
        self._first = self.processes.first_failure(self._failed)
        return self._first.exit_code or self._failed.exit_code

    def print_tracebacks(self) -> None:
        """Prints tracebacks that were not printed, and that of the first failure."""
        new = [e for e in self.processes.ended if e.error not in self._printed]
        first = [] if self._first is None else [self._first]
        print_tracebacks([*new, *first], self._first)

    def _is_going_on(self) -> bool:
        left = [worker for worker in self.workers.values() if worker.is_left]
        if self._done is not None:
            is_late = time.monotonic() - self._done > self.grace_seconds
            return any(not (is_late and self._may_be_late(each)) for each in left)
        if len(left) >= self.min_workers:
            return True
        if left:
            print_line(
                f"{len(left)} of at least {self.min_workers} workers are left; "
                "ending them."
            )
        return False

    def _may_be_late(self, worker: _Worker) -> bool:
        """Whether a restarted worker may be too late to take part in training.

        The oldest worker is the chief, which may still save.
        """
        oldest = min(self.workers.values(), key=lambda each: each.begin)
        return worker.task.incarnation > 0 and worker is not oldest

    def _timeout(self) -> float | None:
        """Seconds to the next start or end; None if only events matter."""
        times = [each.due for each in self.workers.values() if each.due is not None]
        if self._done is not None:
            times.append(self._done + self.grace_seconds)
            if time.monotonic() > times[-1]:
                return None
        return max(0.0, min(times) - time.monotonic()) + 0.01 if times else None

    def _start(self, worker: _Worker) -> None:
        worker.begin, worker.due, worker.is_running = time.monotonic(), None, True
        self.processes.start(worker.task, self.command, worker.environment)

    def _start_due(self) -> None:
        for worker in self.workers.values():
            if worker.due is not None and worker.due <= time.monotonic():
                number = worker.task.incarnation + 1
                worker.task = dataclasses.replace(worker.task, incarnation=number)
                self._start(worker)

    def _ended(self, event: Ended) -> None:
        worker = self.workers[event.task.index]
        worker.is_running = False
        if not event.code:
            if self._done is None:
                self._done = time.monotonic()
                for each in self.workers.values():
                    each.due = None
            return
        # Ends its child processes, which may use its address and devices.
        self.processes.kill(event.task)
        self._failed = event
        if event.error not in self._printed:
            self._printed.add(event.error)
            print_tracebacks([event])
        elif event.error:
            print_line(event.error, str(event.task))
        if self._done is not None:
            print_line(f"{event} after the end of training.")
            return
        if time.monotonic() - worker.begin > _STABLE_SECONDS:
            worker.restarts = 0
        if worker.restarts == self.max_restarts:
            print_line(f"{event}; it is not started again.")
            return
        delay = min(_FIRST_DELAY * 2**worker.restarts, _LONGEST_DELAY)
        worker.restarts += 1
        worker.due = time.monotonic() + delay
        print_line(
            f"{event}; starting it again in {delay:g} s "
            f"({worker.restarts} of {self.max_restarts})."
        )
