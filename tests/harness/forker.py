"""Scripts in processes that have imported Keras already.

Importing Keras and a framework takes seconds of a core for each process, which tests
of clusters would spend most of their time on. So one process imports them, once, and
forks itself for each script, while it has one thread and has used no device. A script
then has an environment, arguments and output of its own, and ends as the interpreter
does: with `atexit`, and with the threads that it has started.

A script that starts scripts itself, such as pytest, calls `keep_fork` first: that is a
fork with the same imports, and `Forker` uses it instead of importing them once more.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import psutil

# How often the forker looks for scripts that have ended, in seconds.
_TICK = 0.02


@dataclass
class _Line:
    """Orders to a process that forks, and its answers; the process that may use it."""

    orders: TextIO
    answers: TextIO
    owner: int
    lock: threading.Lock

    def ask(self, order: Mapping[str, Any]) -> int:
        """The number of the process that an order forks or kills."""
        with self.lock:
            self.orders.write(json.dumps(order) + "\n")
            self.orders.flush()
            return int(self.answers.readline())


_kept: _Line | None = None


@dataclass(frozen=True)
class Forked:
    """A script that runs.

    Args:
        pid: int, its process.
        log: Path, what it has printed; its end is in a file beside it.
    """

    pid: int
    log: Path

    def ended(self) -> tuple[int, float] | None:
        """The exit code and the time of the end; None while it runs."""
        file = _end_of(self.log)
        if not file.exists():
            return None
        code, when = json.loads(file.read_text())
        return int(code), float(when)

    def wait(self, timeout: float) -> tuple[int, float]:
        until = time.monotonic() + timeout
        while (end := self.ended()) is None:
            if time.monotonic() > until:
                raise AssertionError(
                    f"{self.log.name} has not ended in {timeout:g} s:\n{self.text()}"
                )
            time.sleep(_TICK)
        return end

    def text(self) -> str:
        """What it has printed so far."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def kill(self) -> None:
        """Kills the script; the forker holds its number until its end is written."""
        if self.ended() is None:
            os.kill(self.pid, signal.SIGKILL)
            self.wait(10)


class Forker:
    """Starts scripts; closing it kills those that are left.

    Args:
        imports_strategies: bool, whether scripts find `keras_strategies` imported;
            False for scripts that test the order of its imports.
        also: names of other modules that scripts find imported.
        environment: what the forking process has instead of this one's environment.
        errors: Path of a file for what its imports print; otherwise they print here.
    """

    def __init__(
        self,
        imports_strategies: bool = True,
        also: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        errors: Path | None = None,
    ) -> None:
        self._started: list[Forked] = []
        self._process: subprocess.Popen[str] | None = None
        is_plain = imports_strategies and not also and environment is None
        if is_plain and _kept is not None and _kept.owner == os.getpid():
            self._line = _kept
            return
        given = os.environ if environment is None else environment
        modules = ["keras_strategies"] if imports_strategies else []
        self._process = subprocess.Popen(
            [sys.executable, "-m", "harness.forker", *modules, *also],
            env={
                **given,
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                # Libraries that start threads when they are imported cannot be forked.
                "OMP_NUM_THREADS": "1",
                "OPENBLAS_NUM_THREADS": "1",
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if errors is None else errors.open("wb"),
            text=True,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._line = _Line(
            self._process.stdin, self._process.stdout, os.getpid(), threading.Lock()
        )

    def start(
        self, log: Path, script: str, *arguments: str, **environment: str
    ) -> Forked:
        """Starts a script.

        Args:
            log: Path of the file for what it prints.
            script: str, its path.
            *arguments: str, its arguments.
            **environment: str, what is set for it besides what is set here.
        """
        order = {
            "log": str(log),
            "arguments": [script, *arguments],
            "environment": environment,
        }
        self._started.append(Forked(self._line.ask(order), log))
        return self._started[-1]

    def close(self) -> None:
        if self._process is None:
            for script in self._started:
                self._line.ask({"kill": script.pid})
            return
        self._line.orders.close()
        self._process.wait(20)
        self._line.answers.close()

    def __enter__(self) -> Forker:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _end_of(log: Path) -> Path:
    return log.with_suffix(".end")


def keep_fork() -> None:
    """Forks a process for the scripts that this one will start.

    For a script that a `Forker` has started, at its beginning: it has the imports, one
    thread, and has used no device.
    """
    global _kept
    order_end, orders = os.pipe()
    answers, answer_end = os.pipe()
    if os.fork():
        os.close(order_end)
        os.close(answer_end)
        line = os.fdopen(orders, "w"), os.fdopen(answers)
        _kept = _Line(*line, os.getpid(), threading.Lock())
        return
    os.close(orders)
    os.close(answers)
    with open(order_end) as taken, open(answer_end, "w") as given:
        script = _serve(taken, given)
    if script is not None:
        _run(script)
    sys.exit()


def _become(order: Mapping[str, Any]) -> None:
    """Makes this process that of a script."""
    with open(order["log"], "wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.update(order["environment"])
    sys.argv[:] = order["arguments"]


def _serve(orders: TextIO, answers: TextIO) -> str | None:
    """Forks until the orders end; returns in each fork with the path of its script."""
    logs: dict[int, Path] = {}
    is_open = True
    while is_open:
        if select.select([orders], [], [], _TICK)[0]:
            line = orders.readline()
            is_open = bool(line)
            if is_open:
                order = json.loads(line)
                pid = order.get("kill") or os.fork()
                if not pid:
                    _become(order)
                    return str(sys.argv[0])
                if "kill" not in order:
                    logs[pid] = Path(order["log"])
                elif pid in logs:
                    os.kill(pid, signal.SIGKILL)
                print(pid, file=answers, flush=True)
        _reap(logs)
    for pid in logs:
        psutil.Process(pid).kill()
    return None


def _reap(logs: dict[int, Path]) -> None:
    for pid in list(logs):
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            end = json.dumps([os.waitstatus_to_exitcode(status), time.time()])
            file = _end_of(logs.pop(pid))
            # The folder may be gone, if nothing waits for the end.
            with contextlib.suppress(FileNotFoundError):
                file.with_suffix(".part").write_text(end)
                file.with_suffix(".part").rename(file)


def _main() -> None:
    import keras

    for name in sys.argv[1:]:
        importlib.import_module(name)
    if "keras_strategies" in sys.argv:
        import keras_strategies as ks

        assert ks.MultiWorkerMirroredStrategy and ks.ParameterServerStrategy
    # What imports more when it is first used; saving looks for TensorFlow.
    keras.saving.serialize_keras_object(keras.layers.Dense(1))
    assert len(os.listdir("/proc/self/task")) == 1, "forks need a single thread"
    # A fork would copy all this memory when it collects garbage at its end.
    gc.collect()
    gc.freeze()
    # Tracing programs makes millions of objects and little garbage.
    gc.set_threshold(100_000, 20, 20)
    script = _serve(sys.stdin, sys.stdout)
    if script is not None:
        _run(script)


def _run(script: str) -> None:
    import runpy

    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    _main()
