"""Launcher of a group of processes: start, output, events, end."""

from __future__ import annotations

import functools
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TextIO

from keras_strategies.cluster import first_causes
from keras_strategies.cluster.first_causes import Failure
from keras_strategies.processes import engine_messages, task_output
from keras_strategies.processes.held_traceback import HEADER, HeldTraceback
from keras_strategies.processes.local_cluster import LocalTask
from keras_strategies.processes.process_group import (
    GUARD,
    KILL_SECONDS,
    ProcessGroup,
)
from keras_strategies.timeline.runs import last_events

# Signals by which a process ends through a fault of its own code.
_FAULTS = (
    signal.SIGABRT,
    signal.SIGBUS,
    signal.SIGFPE,
    signal.SIGILL,
    signal.SIGSEGV,
    signal.SIGSYS,
    signal.SIGTRAP,
)
# Seconds to wait for the rest of an ended task's output: a child process may still hold
# the pipe.
_PIPE_SECONDS = 1.0
# Seconds to wait for the end of the task that has caused the end of another.
_CAUSE_SECONDS = 10.0


@dataclass(frozen=True)
class Ended:
    """A task has ended, with an exit code or with minus the number of a signal.

    Args:
        task: the task.
        code: int.
        last_error: str, the last line of its standard error.
        failure: `Failure` that it has recorded, or None.
        events: str, a sentence about the last events of one that was killed.
        held: str, the traceback that was held back, with what followed it.
    """

    task: LocalTask
    code: int
    last_error: str = ""
    failure: Failure | None = None
    events: str = ""
    held: str = ""

    @property
    def traceback(self) -> str:
        """str, how it has failed by itself or by another; "" where none is known."""
        if self.held or self.failure is None or self.is_caused:
            return self.held
        return self.failure.traceback

    @property
    def error(self) -> str:
        """str, the line of the traceback that names the error."""
        rest = self.traceback.rpartition(HEADER)[2].splitlines()
        named = (line for line in rest if line and not line.startswith(" "))
        return next(named, self.traceback)

    @property
    def is_caused(self) -> bool:
        """bool, whether the failure of another task has caused this one."""
        return self.failure is not None and self.failure.is_caused

    @property
    def exit_code(self) -> int:
        """int, as a shell gives it: 128 + the signal for a task that was killed."""
        return self.code if self.code >= 0 else 128 - self.code

    @property
    def is_from_outside(self) -> bool:
        """Whether it was ended by a signal that others send: SIGTERM, SIGKILL, ...

        The system sends SIGKILL when memory runs out, whoever uses it.
        """
        return self.code < 0 and -self.code not in _FAULTS

    @property
    def how(self) -> str:
        """str, such as "ended with exit code 1"."""
        if self.code >= 0:
            return f"ended with exit code {self.code}"
        with suppress(ValueError):
            return f"was ended by {signal.Signals(-self.code).name}"
        return f"was ended by signal {-self.code}"

    def __str__(self) -> str:
        return f"{self.task} {self.how}"

    @property
    def is_cause(self) -> bool:
        """bool, whether it has failed by itself."""
        # Also with exit code 0, as by `sys.exit()` in a callback.
        return not self.is_caused and bool(self.code or self.failure)


@dataclass(frozen=True)
class Signalled:
    """The launcher has received a signal."""

    number: int


Events = queue.SimpleQueue[Ended | Signalled]


@contextmanager
def signals_as_events(events: Events) -> Iterator[None]:
    """Turns Ctrl-C and SIGTERM into events, for an orderly end."""

    def handle(number: int, frame: FrameType | None) -> None:
        events.put(Signalled(number))

    # Also Ctrl-C where it was ignored, as in the background of a script: ignoring
    # would be inherited by every task.
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class ProcessLauncher:
    """The running processes of one cluster; leaving the context ends them.

    Args:
        events: receives an `Ended` for each task.
        grace_seconds: float, seconds between the signal to end a process and SIGKILL.
        out: stream for the output of tasks, None for `sys.stdout`.
        holds_tracebacks: bool, whether the traceback with which a task ends is part of
            its `Ended` and not printed.
    """

    def __init__(
        self,
        events: Events,
        grace_seconds: float,
        out: TextIO | None = None,
        holds_tracebacks: bool = False,
    ):
        self._events = events
        self._grace = grace_seconds
        self._streams = (out or sys.stdout, sys.stderr)
        self._running: dict[LocalTask, ProcessGroup] = {}
        # Ended tasks with child processes that still run.
        self._left: dict[LocalTask, ProcessGroup] = {}
        self._groups: set[ProcessGroup] = set()
        self._threads: dict[LocalTask, list[threading.Thread]] = {}
        self._last_errors: dict[LocalTask, str] = {}
        self._holds = holds_tracebacks
        self._held: dict[LocalTask, HeldTraceback] = {}
        #: All ends, in their order.
        self.ended: list[Ended] = []
        self._guard: ProcessGroup
        self._folder: tempfile.TemporaryDirectory[str]
        # The last signal that was received, also while processes were being ended.
        self.signalled: Signalled | None = None

    def __enter__(self) -> ProcessLauncher:
        self._folder = tempfile.TemporaryDirectory(prefix="keras-strategies-errors-")
        self._guard = ProcessGroup(
            [*GUARD, "watch"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            is_text=True,
            ends_with_parent=False,
        )
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            self.end()
        finally:
            self._guard.close(KILL_SECONDS)
            self._folder.cleanup()

    def start(
        self,
        task: LocalTask,
        command: Sequence[str],
        environment: Mapping[str, str],
    ) -> None:
        """Starts one task in a new process group, copies its output, reports its end.

        The task ends with the calling thread.
        """
        file = self._error_file(task)
        file.unlink(missing_ok=True)
        process = ProcessGroup(
            command,
            {**environment, first_causes.VARIABLE: str(file)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self._running[task] = process
        self._groups.add(process)
        self._notify_guard(f"+{process.pid}")
        assert process.stdout is not None and process.stderr is not None
        pipes = (process.stdout, process.stderr)
        observers = (None, functools.partial(self._last_errors.__setitem__, task))
        write = functools.partial(task_output.write, self._streams[1], str(task))
        held = self._held[task] = HeldTraceback(write)
        holds = (None, held.takes if self._holds else None)
        pumps = [
            self._thread(
                task,
                task_output.copy,
                os.dup(pipe.fileno()),
                stream,
                str(task),
                engine_messages.are_wanted(environment),
                observe,
                hold,
            )
            for pipe, stream, observe, hold in zip(
                pipes, self._streams, observers, holds, strict=True
            )
        ]
        for pipe in pipes:
            pipe.close()
        self._threads[task] = [*pumps, self._thread(task, self._wait, task, process)]
        for thread in self._threads[task]:
            thread.start()

    def _error_file(self, task: LocalTask) -> Path:
        return Path(self._folder.name) / f"{task}.json".replace(" ", "-")

    def _thread(
        self, task: LocalTask, run: Callable[..., None], *args: object
    ) -> threading.Thread:
        name = f"launch {task}"
        return threading.Thread(target=run, args=args, name=name, daemon=True)

    def _wait(self, task: LocalTask, process: ProcessGroup) -> None:
        code = process.wait()
        assert code is not None
        for thread in self._threads[task]:
            if thread is not threading.current_thread():
                thread.join(_PIPE_SECONDS)
        failure = Failure.read(self._error_file(task))
        last = self._last_errors.pop(task, "")
        events = last_events(process.pid) if code < 0 else ""
        held = self._held.pop(task)
        if not code:
            held.release()
        self._events.put(Ended(task, code, last, failure, events, held.take()))

    def next_event(self, timeout: float | None = None) -> Ended | Signalled | None:
        """Waits for the next event; None after `timeout` seconds without one."""
        try:
            event = self._events.get(timeout=timeout)
        except queue.Empty:
            return None
        if isinstance(event, Ended):
            process = self._running.pop(event.task)
            del self._threads[event.task]
            if not process.exists:
                # The system may give its number to another group.
                self._groups.discard(process)
                self._notify_guard(f"-{process.pid}")
            else:
                self._left[event.task] = process
            self.ended.append(event)
        else:
            self.signalled = event
        return event

    def first_failure(self, ended: Ended) -> Ended:
        """The end of the task that has failed by itself, before the others.

        Args:
            ended: the first failure that was seen; the one that has caused it may end
                later.
        """
        until = time.monotonic() + _CAUSE_SECONDS
        while ended.is_caused and self.signalled is None:
            # Of a task that was started again, its last process counts.
            last = {(each.task.job, each.task.index): each for each in self.ended}
            causes = [each for each in last.values() if each.is_cause]
            if causes:
                return causes[0]
            left = until - time.monotonic()
            if left <= 0 or not self._running:
                break
            self.next_event(left)
        return ended

    def kill(self, task: LocalTask) -> None:
        """Kills a task and its child processes, if any of them runs."""
        process = self._running.get(task) or self._left.pop(task, None)
        if process is not None:
            process.send(signal.SIGKILL)

    def end(self, number: int = signal.SIGTERM) -> None:
        """Ends all processes with a signal, and after the grace period with SIGKILL."""
        if self._running:
            self._send(number)
        deadline = time.monotonic() + self._grace
        self._wait_until(deadline, impatient=True)
        # Child processes of tasks too.
        self._send(signal.SIGKILL)
        self._wait_until(time.monotonic() + KILL_SECONDS, impatient=False)
        for group in self._groups:
            self._notify_guard(f"-{group.pid}")
        self._groups.clear()
        for task in self._running:
            task_output.write(self._streams[1], "launch", f"{task} cannot be killed.")
        self._running.clear()

    def _wait_until(self, deadline: float, *, impatient: bool) -> None:
        while self._running and (left := deadline - time.monotonic()) > 0:
            # A second Ctrl-C skips the grace period.
            if isinstance(self.next_event(left), Signalled) and impatient:
                return

    def _send(self, number: int) -> None:
        for group in self._groups:
            group.send(number)

    def _notify_guard(self, line: str) -> None:
        assert self._guard.stdin is not None
        with suppress(BrokenPipeError):
            self._guard.stdin.write(f"{line}\n")
