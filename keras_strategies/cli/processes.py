"""The processes of a cluster on this machine, which live and end together."""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
# How long processes may take to end after they were asked to.
GRACE_SECONDS = 10.0


class Output(Protocol):
    """What lines go to: a binary stream, or what acts as one."""

    def write(self, data: bytes, /) -> object: ...

    def flush(self) -> object: ...


@dataclass(frozen=True)
class Task:
    """One process to be started.

    Args:
        name: str, what its lines of output begin with, such as `"worker 1"`.
        command: list of str.
        environment: dict, all of its environment variables.
        runs_forever: bool, whether it serves others and never ends by itself.
    """

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    runs_forever: bool = False


@dataclass(frozen=True)
class Ended:
    """How a cluster ended.

    Args:
        code: int, 0, or the exit code of the first task that failed; 128 plus the
            signal's number where a signal ended it.
        task: str, the name of that task; `""` where none failed.
    """

    code: int
    task: str = ""


class _Process:
    """A task's process and the thread that reads its output."""

    def __init__(
        self, task: Task, output: Output, lock: threading.Lock, ended: queue.Queue
    ):
        self.task = task
        self._label = f"[{task.name}] ".encode()
        self._output = output
        self._lock = lock
        self._ended = ended
        self.process = subprocess.Popen(
            list(task.command),
            env=dict(task.environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            # A group of its own, so that its children end with it.
            start_new_session=True,
            preexec_fn=_end_with_the_parent if sys.platform == "linux" else None,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                with self._lock:
                    self._output.write(self._label + line.rstrip(b"\n") + b"\n")
                    self._output.flush()
        self.process.wait()
        self._ended.put(self)

    def send(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)

    def wait(self, until: float) -> bool:
        """Waits until a moment of `time.monotonic()`; whether it has ended."""
        self._reader.join(max(0.0, until - time.monotonic()))
        return not self._reader.is_alive()

    @property
    def code(self) -> int:
        code = self.process.returncode
        return 128 - code if code < 0 else code


def _end_with_the_parent() -> None:
    """In the child: SIGTERM when the parent is gone, however it went."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def run_together(tasks: Iterable[Task], output: Output | None = None) -> Ended:
    """Runs tasks until all that end by themselves have, or one fails.

    Their output goes to one stream, each line with the task's name before it. When
    this function returns or raises, none of the processes is left.

    Args:
        tasks: what to start.
        output: binary stream; None for this process's standard output.

    Returns:
        An `Ended`.
    """
    stream: Output = sys.stdout.buffer if output is None else output
    ended: queue.Queue[_Process] = queue.Queue()
    lock = threading.Lock()
    processes: list[_Process] = []
    try:
        for task in tasks:
            processes.append(_Process(task, stream, lock, ended))
        waiting = {p.task.name for p in processes if not p.task.runs_forever}
        while waiting:
            process = ended.get()
            if process.code or process.task.runs_forever:
                return Ended(process.code or 1, process.task.name)
            waiting.discard(process.task.name)
        return Ended(0)
    finally:
        _end(processes)


def _end(processes: Sequence[_Process]) -> None:
    """Asks all to end, and ends those that do not."""
    for process in processes:
        process.send(signal.SIGTERM)
    until = time.monotonic() + GRACE_SECONDS
    for process in processes:
        if not process.wait(until):
            process.send(signal.SIGKILL)
            process.wait(time.monotonic() + GRACE_SECONDS)
        # Children that have outlived their parent.
        process.send(signal.SIGKILL)
