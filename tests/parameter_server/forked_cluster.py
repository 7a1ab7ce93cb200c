"""Processes of parameter-server clusters, forked instead of started.

Started processes are interpreters that import Keras, which takes seconds for each. Here
a `Forker` forks them from one that has. The rest of a cluster is the same: the
functions of its processes, the coordinator's requests and the reports of their ends.
"""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from harness.forker import Forked, Forker

from keras_strategies.parameter_server.coordinator.cluster_processes import (
    EndCause,
    ProcessCall,
)
from keras_strategies.processes.launcher import Ended
from keras_strategies.processes.local_cluster import LocalTask


class ForkedProcesses:
    """Stands in for `ClusterProcesses`.

    Args:
        forker: forks the processes.
        call_of, environment: see `ClusterProcesses`.
    """

    def __init__(
        self,
        forker: Forker,
        call_of: Callable[[LocalTask], ProcessCall],
        environment: Mapping[str, str],
    ):
        self._forker = forker
        self._call_of = call_of
        self._environment = environment
        self._folder = tempfile.TemporaryDirectory(prefix="ks-fork-")
        self._running: dict[LocalTask, Forked] = {}

    def start(self, task: LocalTask) -> None:
        call = self._call_of(task)
        log = Path(self._folder.name) / f"{task}-{task.incarnation}.log"
        self._running[task] = self._forker.start(
            log,
            __file__,
            call.entry,
            json.dumps(call.arguments),
            **{**self._environment, **call.environment},
        )

    def kill(self, task: LocalTask) -> None:
        if task in self._running:
            self._running[task].send_kill()

    def ended(self) -> Iterator[tuple[LocalTask, EndCause]]:
        for task, process in list(self._running.items()):
            if process.ended() is not None:
                del self._running[task]
                yield task, _cause(task, process)

    def close(self) -> None:
        """Ends all processes; returns when they are gone."""
        for process in self._running.values():
            process.kill()
        self._folder.cleanup()


def _cause(task: LocalTask, process: Forked) -> EndCause:
    code, _ = process.ended() or (0, 0.0)
    end = Ended(task, code)
    lines = process.text().strip().splitlines() if code > 0 else []
    return EndCause([f"it {end.how}", *lines][-1], end.is_from_outside)


def _run(entry: str, arguments: str) -> None:
    module, function = entry.split(":")
    getattr(importlib.import_module(module), function)(**json.loads(arguments))


if __name__ == "__main__":
    _run(*sys.argv[1:])
