"""Launcher of a group of processes: start, output, events, end."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TextIO

from keras_strategies.processes import engine_messages, task_output
from keras_strategies.processes.local_cluster import LocalTask

_GUARD = [sys.executable, "-I", "-S", str(Path(__file__).with_name("orphan_guard.py"))]
# A killed process ends at once, unless a disk or a driver blocks it in the kernel.
_KILL_SECONDS = 10.0
# What a task has printed has come through the pipe when the task has ended, unless
# one of its own children still holds the pipe.
_PIPE_SECONDS = 1.0


@dataclass(frozen=True)
class Ended:
    """A task has ended, with an exit code or with minus the number of a signal."""

    task: LocalTask
    code: int

    @property
    def exit_code(self) -> int:
        """int, as a shell gives it: 128 + the signal for a task that was killed."""
        return self.code if self.code >= 0 else 128 - self.code

    def __str__(self) -> str:
        if self.code >= 0:
            return f"{self.task} ended with exit code {self.code}"
        with suppress(ValueError):
            return f"{self.task} was ended by {signal.Signals(-self.code).name}"
        return f"{self.task} was ended by signal {-self.code}"


@dataclass(frozen=True)
class Signalled:
    """The launcher got a signal."""

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
        events: where `Ended` is put for each task.
        grace_seconds: float, seconds between the signal to end a process and SIGKILL.
        out: stream for what tasks print, None for `sys.stdout`.
        err: stream for their errors, None for `sys.stderr`.
    """

    def __init__(
        self,
        events: Events,
        grace_seconds: float,
        out: TextIO | None = None,
        err: TextIO | None = None,
    ):
        self._events = events
        self._grace = grace_seconds
        self._streams = (out or sys.stdout, err or sys.stderr)
        self._running: dict[LocalTask, subprocess.Popen[bytes]] = {}
        self._groups: set[int] = set()
        self._threads: dict[LocalTask, list[threading.Thread]] = {}
        self._guard: subprocess.Popen[str]
        # The last signal that came, also while processes were being ended.
        self.signalled: Signalled | None = None

    def __enter__(self) -> ProcessLauncher:
        self._guard = subprocess.Popen(
            [*_GUARD, "watch"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            bufsize=1,
            start_new_session=True,
        )
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            self.end()
        finally:
            assert self._guard.stdin is not None
            with suppress(BrokenPipeError):
                self._guard.stdin.close()
            self._guard.wait()

    def start(
        self, task: LocalTask, command: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        """Starts one task in a new process group.

        It must be called by a thread that lives as long as the tasks are to.
        """
        process = subprocess.Popen(
            [*_GUARD, "run", str(os.getpid()), *command],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._running[task] = process
        self._groups.add(process.pid)
        self._notify_guard(f"+{process.pid}")
        assert process.stdout is not None and process.stderr is not None
        pipes = (process.stdout, process.stderr)
        pumps = [
            self._thread(
                task,
                task_output.copy,
                os.dup(pipe.fileno()),
                stream,
                str(task),
                engine_messages.are_wanted(environment),
            )
            for pipe, stream in zip(pipes, self._streams, strict=True)
        ]
        for pipe in pipes:
            pipe.close()
        self._threads[task] = [*pumps, self._thread(task, self._wait, task, process)]
        for thread in self._threads[task]:
            thread.start()

    def _thread(
        self, task: LocalTask, run: Callable[..., None], *args: object
    ) -> threading.Thread:
        name = f"launch {task}"
        return threading.Thread(target=run, args=args, name=name, daemon=True)

    def _wait(self, task: LocalTask, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        for thread in self._threads[task]:
            if thread is not threading.current_thread():
                thread.join(_PIPE_SECONDS)
        self._events.put(Ended(task, code))

    def next_event(self, timeout: float | None = None) -> Ended | Signalled | None:
        """Waits for the next event; None after `timeout` seconds without one."""
        try:
            event = self._events.get(timeout=timeout)
        except queue.Empty:
            return None
        if isinstance(event, Ended):
            process = self._running.pop(event.task)
            if not _exists(process.pid):
                # Its number may soon be that of another group.
                self._groups.discard(process.pid)
                self._notify_guard(f"-{process.pid}")
        else:
            self.signalled = event
        return event

    def end(self, number: int = signal.SIGTERM) -> None:
        """Ends all processes with a signal, and after the grace period with SIGKILL."""
        if self._running:
            self._send(number)
        deadline = time.monotonic() + self._grace
        self._wait_until(deadline, impatient=True)
        # Child processes of tasks too.
        self._send(signal.SIGKILL)
        self._wait_until(time.monotonic() + _KILL_SECONDS, impatient=False)
        for group in self._groups:
            self._notify_guard(f"-{group}")
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
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(group, number)

    def _notify_guard(self, line: str) -> None:
        assert self._guard.stdin is not None
        with suppress(BrokenPipeError):
            self._guard.stdin.write(f"{line}\n")


def _exists(group: int) -> bool:
    """Whether a process group has a member."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
