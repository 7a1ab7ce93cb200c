"""Processes of parameter-server clusters, forked instead of started by Ray.

Ray takes seconds to start, and then starts interpreters that import Keras, for each
cluster. Here a `Forker` forks them. The rest of a cluster is the same: what runs in
its processes, what the coordinator asks for, and what it hears of their ends.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import signal
import sys
import tempfile
import threading
from pathlib import Path

from harness.forker import Forked, Forker
from keras_strategies.parameter_server.coordinator.ray_launcher import ProcessStart
from keras_strategies.parameter_server.wire.request_connection import Connection

_POLL_SECONDS = 0.02


class ForkingManager:
    """Stands in for `ray_launcher.RayManager`.

    Args:
        forker: forks the processes.
        control: str, the coordinator's address.
        environment: dict, for the processes.
        cpus, store_bytes: int, for Ray; not used.
    """

    def __init__(
        self,
        forker: Forker,
        control: str,
        environment: dict[str, str],
        cpus: int,
        store_bytes: int = 0,
    ):
        self._forker = forker
        self._control = control
        self._environment = environment
        self._folder = tempfile.TemporaryDirectory(prefix="ks-fork-")
        self._running: dict[tuple[str, int, int], Forked] = {}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._manage, name="forking-manager")
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def close(self) -> None:
        """Ends all processes; returns when they are gone."""
        self._closing.set()
        self._thread.join()
        for process in self._running.values():
            process.kill()
        self._folder.cleanup()

    def _manage(self) -> None:
        connection = Connection(self._control, None, "the coordinator")
        connection.post((0, ("manager", os.getpid())))
        try:
            while not self._closing.is_set():
                message = connection.receive(_POLL_SECONDS)
                if message is not None:
                    _, (kind, value) = message
                    if kind == "start":
                        self._start(value)
                    elif kind == "kill":
                        self._kill(*value)
                for name, process in list(self._running.items()):
                    if process.ended() is not None:
                        del self._running[name]
                        reason = _reason(process)
                        connection.post((0, ("ended", (*name, reason))))
        finally:
            connection.close()

    def _start(self, start: ProcessStart) -> None:
        name = (start.kind, start.index, start.incarnation)
        path = Path(self._folder.name) / "-".join(map(str, name))
        path.write_bytes(pickle.dumps((start.entry, start.arguments)))
        self._running[name] = self._forker.start(
            path.with_suffix(".log"), __file__, str(path), **self._environment
        )

    def _kill(self, kind: str, index: int, incarnation: int, pid: int) -> None:
        process = self._running.get((kind, index, incarnation))
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)


def _reason(process: Forked) -> str:
    code, _ = process.ended() or (0, 0.0)
    if code < 0:
        return f"it was ended by signal {-code}"
    lines = process.text().strip().splitlines()
    return lines[-1] if code and lines else "it ended"


def _run(path: str) -> None:
    entry, arguments = pickle.loads(Path(path).read_bytes())
    module, function = entry.split(":")
    getattr(importlib.import_module(module), function)(**arguments)


if __name__ == "__main__":
    _run(sys.argv[1])
