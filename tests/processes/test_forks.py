"""Tasks that are forked from a process that has imported Keras."""

from __future__ import annotations

import io
import json
import os
import queue
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from harness.processes import assert_gone

import keras_strategies as ks
from keras_strategies.processes.forks.fork_launcher import ForkLauncher, are_forks_safe
from keras_strategies.processes.launcher import Ended, Events, ProcessLauncher
from keras_strategies.processes.local_cluster import LocalTask

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux forks"),
]
SECONDS = 60.0
# What tasks call, and an import of the server that makes forks unsafe.
CODE = """
import json, os, sys, threading, time
import numpy as np

def report(file, code=0, waits=False):
    facts = {
        "pid": os.getpid(),
        "server": os.getppid(),
        "keras": "keras" in sys.modules,
        "is_forked": os.environ["KS_SERVER"] in open("/proc/self/cmdline").read(),
        "random": np.random.random(),
    }
    with open(file + ".part", "w") as stream:
        json.dump(facts, stream)
    os.rename(file + ".part", file)
    print("reported", flush=True)
    if waits:
        time.sleep(600)
    sys.exit(code)
"""
THREAD = "import threading, time\n" + (
    "threading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
)


class Tasks:
    """Tasks of a server that imports some modules."""

    def __init__(self, launcher: ProcessLauncher, folder: Path, modules: list[str]):
        environment = {"KERAS_BACKEND": "jax", "KS_SERVER": "fork_server"}
        self.folder = folder
        self._launcher = launcher
        self.forks = ForkLauncher(launcher, environment, modules)
        self.ends: dict[str, str] = {}

    def start(self, name: str, **options: object) -> None:
        arguments = {"file": str(self.folder / name), **options}
        task = LocalTask(name, 0)
        self.forks.start(task, "functions_of_tasks:report", arguments)

    def wait(self, holds: Callable[[], bool]) -> None:
        until = time.monotonic() + SECONDS
        while not holds():
            assert time.monotonic() < until, self.ends
            for task, reason in self.forks.update():
                self.ends[task.job] = reason
            event = self._launcher.next_event(0.02)
            if isinstance(event, Ended) and self.forks.is_server(event.task):
                for task, reason in self.forks.server_ended(event.how):
                    self.ends[task.job] = reason
            elif isinstance(event, Ended):
                self.ends[event.task.job] = event.how

    def report(self, name: str) -> dict[str, object]:
        file = self.folder / name
        self.wait(file.exists)
        return json.loads(file.read_text())


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "functions_of_tasks.py").write_text(CODE)
    (tmp_path / "module_with_a_thread.py").write_text(THREAD)

    @contextmanager
    def made(*modules: str) -> Iterator[Tasks]:
        events: Events = queue.SimpleQueue()
        out = io.StringIO()
        with ProcessLauncher(events, 1.0, out, sys.stderr) as launcher:
            found = Tasks(launcher, tmp_path, ["functions_of_tasks", *modules])
            try:
                yield found
            finally:
                found.forks.close()
        found.output = out.getvalue()

    return made


def test_tasks_are_forked_and_end_as_processes_do(tasks) -> None:
    with tasks() as started:
        started.start("first", code=3)
        started.start("second", waits=True)
        first, second = started.report("first"), started.report("second")
        assert first["server"] == second["server"] != first["pid"]
        assert first["is_forked"] and second["is_forked"]
        assert first["random"] != second["random"]
        started.wait(lambda: "first" in started.ends)
        assert started.ends == {"first": "ended with exit code 3"}
        started.forks.kill(LocalTask("second", 0))
        started.wait(lambda: "second" in started.ends)
        assert started.ends["second"] == "was ended by SIGKILL"
        # Killed before it is forked.
        started.start("third", waits=True)
        started.forks.kill(LocalTask("third", 0))
        started.wait(lambda: "third" in started.ends)
        assert started.ends["third"] == "was ended by SIGKILL"
    assert "[first 0] reported" in started.output.splitlines()
    assert not psutil.pid_exists(first["server"])


def test_tasks_end_with_their_server_and_the_next_one_gets_another(tasks) -> None:
    with tasks() as started:
        started.start("first", waits=True)
        first = started.report("first")
        psutil.Process(first["server"]).kill()
        started.wait(lambda: "first" in started.ends)
        assert started.ends["first"] == "was ended by SIGKILL"
        started.wait(lambda: started.forks._control is None)
        started.start("second", waits=True)
        second = started.report("second")
        assert second["server"] != first["server"]
        assert_gone([first["pid"]])
    assert_gone([second["pid"]])


def test_a_server_with_threads_starts_interpreters_instead(tasks) -> None:
    with tasks("module_with_a_thread") as started:
        started.start("first")
        found = started.report("first")
        assert found["keras"] and not found["is_forked"]


def test_a_server_that_cannot_import_is_the_reason(tasks, capsys) -> None:
    with tasks("module_that_is_missing") as started:
        started.start("first")
        started.wait(lambda: "first" in started.ends)
        assert started.ends["first"] == "ended with exit code 1"


def test_optional_packages_start_no_threads() -> None:
    """In a process as users start it: pandas imports PyArrow, which has threads."""
    code = (
        "from keras_strategies.processes.forks.fork_server import can_fork\n"
        "from keras_strategies.processes.keras_import import import_keras\n"
        "import_keras(); import importlib.util as util, sys\n"
        "assert util.find_spec('pyarrow') and util.find_spec('pandas')\n"
        "assert can_fork(), sorted(sys.modules)"
    )
    root = Path(ks.__file__).parents[1]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    subprocess.run(
        [sys.executable, "-c", code],
        env={**environment, "PYTHONPATH": str(root)},
        check=True,
        timeout=SECONDS,
    )


def test_visible_gpus_make_forks_unsafe() -> None:
    assert are_forks_safe({"CUDA_VISIBLE_DEVICES": ""})
    assert not are_forks_safe({"CUDA_VISIBLE_DEVICES": "0"})
