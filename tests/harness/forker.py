"""Scripts in processes that have imported Keras already, on any backend.

Importing Keras and a framework takes 4 to 8 seconds of a core for each process. Scripts
of tests are forked instead, from a process of `fork_server` that has done so. A script
has an environment, arguments and output of its own, and ends as the interpreter does:
with `atexit`, and with the threads that it has started.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import fork_server

# How often the end of a script is looked for, in seconds.
_TICK = 0.02


@dataclass(frozen=True)
class Forked:
    """A script that runs.

    Args:
        pid: int, its process, which leads a session of its own.
        log: Path of its output; its end is in a file beside it.
    """

    pid: int
    log: Path

    def ended(self) -> tuple[int, float] | None:
        """The exit code and the time of the end; None while it runs."""
        file = fork_server.end_of(self.log)
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
        """Its output so far."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def send_kill(self) -> None:
        """Kills the script, and does not wait for its end."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def kill(self) -> None:
        """Kills the script; the server reaps it when its end is written."""
        if self.ended() is None:
            self.send_kill()
            self.wait(10)


class Forker:
    """Starts scripts; closing it kills those that are left.

    Args:
        backend: str, the backend of the scripts; by default that of this process.
        imports_strategies: bool, whether scripts find `keras_strategies` imported;
            False for scripts that import it themselves or do without.
    """

    def __init__(self, backend: str = "", imports_strategies: bool = True) -> None:
        self._started: list[Forked] = []
        self._lock = threading.Lock()
        self._socket = socket.socket(socket.AF_UNIX)
        backend = backend or os.environ["KERAS_BACKEND"]
        self._socket.connect(str(fork_server.find(backend, imports_strategies)))
        self._stream = self._socket.makefile("rw")

    def start(
        self, log: Path, script: str, *arguments: str, **environment: str
    ) -> Forked:
        """Starts a script.

        Args:
            log: Path of the file for its output.
            script: str, its path.
            *arguments: str, its arguments.
            **environment: str, environment variables besides those of the server.
        """
        order = {
            "log": str(log),
            "arguments": [script, *arguments],
            "environment": environment,
        }
        self._started.append(Forked(self._ask(order), log))
        return self._started[-1]

    def start_workers(
        self, logs: Sequence[Path], script: str, *arguments: str, **environment: str
    ) -> list[Forked]:
        """Starts a script as each worker of a new cluster, one for each log.

        One process alone gets no `TF_CONFIG`.
        """
        from keras_strategies.cluster.resolvers.local_processes import free_addresses

        spec, started = {"worker": free_addresses(len(logs))}, []
        for index, log in enumerate(logs):
            task = {"type": "worker", "index": index}
            own = {"OMP_NUM_THREADS": "1", **environment}
            if len(logs) > 1:
                own["TF_CONFIG"] = json.dumps({"cluster": spec, "task": task})
            started.append(self.start(log, script, *arguments, **own))
        return started

    def _ask(self, order: Mapping[str, Any]) -> int:
        """The number of the process that an order forks or kills."""
        with self._lock:
            self._stream.write(json.dumps(order) + "\n")
            self._stream.flush()
            answer = self._stream.readline()
        if not answer:
            raise AssertionError("The process that forks scripts has ended.")
        return int(answer)

    def close(self) -> None:
        for script in self._started:
            with contextlib.suppress(OSError, AssertionError):
                self._ask({"kill": script.pid})
        self._stream.close()
        self._socket.close()

    def __enter__(self) -> Forker:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def run_code(
    folder: Path,
    code: str,
    *arguments: str,
    backend: str = "",
    imports_strategies: bool = False,
    timeout: float = 120.0,
    **environment: str,
) -> str:
    """Runs code as a script to its end; returns its output.

    Args:
        folder: Path of the folder for the script and its log.
        code: str, the script.
        *arguments: str, its arguments.
        backend, imports_strategies: see `Forker`.
        timeout: float, seconds that it may take.
        **environment: str, its environment variables.

    Raises:
        AssertionError: with its output, if its exit code is not 0.
    """
    script = folder / "script.py"
    script.write_text(code)
    with Forker(backend, imports_strategies) as forker:
        forked = forker.start(
            folder / "script.log", str(script), *arguments, **environment
        )
        exit_code, _ = forked.wait(timeout)
    assert exit_code == 0, f"exit code {exit_code}:\n{forked.text()}"
    return forked.text()
