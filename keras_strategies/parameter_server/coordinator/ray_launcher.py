"""Ray launcher: starts a local cluster's processes and reports their ends.

Ray runs in a process of its own, the *manager*: the coordinator's process has no
threads or environment of Ray, and several strategies have separate clusters. The
manager ends when its standard input is closed, so that nothing remains of a coordinator
that was killed.

    python -m keras_strategies.parameter_server.coordinator.ray_launcher
        Reads a pickled `RayManagerSetup` from its standard input, starts Ray on the
        loopback interface, and starts and kills processes for the coordinator.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import pickle
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keras_strategies.cluster.environment import QUIET
from keras_strategies.parameter_server.wire.request_connection import Connection
from keras_strategies.processes import engine_messages

#: Seconds until a manager that does not end is killed.
_END_SECONDS = 20.0
#: Bytes of Ray's object store, which carries nothing: the least that Ray accepts.
_STORE_BYTES = 80 << 20


@dataclass(frozen=True)
class RayManagerSetup:
    """Configuration of a manager process.

    Args:
        control: str, the coordinator's address.
        folder: str, for Ray's files.
        cpus: int, number of CPUs of the Ray cluster.
    """

    control: str
    folder: str
    cpus: int


@dataclass(frozen=True)
class ProcessStart:
    """A process to start.

    Args:
        kind: str, `"worker"` or `"ps"`.
        index: int.
        incarnation: int, number of earlier processes with this kind and index.
        entry: str, `"module:function"`.
        arguments: dict for the function.
    """

    kind: str
    index: int
    incarnation: int
    entry: str
    arguments: dict[str, Any]


class RayManager:
    """The coordinator's handle of the manager process.

    Args:
        control: str, the coordinator's address.
        environment: dict, of the manager and its processes.
        cpus: int, number of processes.
    """

    def __init__(
        self,
        control: str,
        environment: dict[str, str],
        cpus: int,
    ):
        self._folder = tempfile.TemporaryDirectory(prefix="ks-ray-")
        token = secrets.token_hex(32)
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "keras_strategies.parameter_server.coordinator.ray_launcher",
            ],
            stdin=subprocess.PIPE,
            env={
                **environment,
                "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path),
                # Read when Ray is imported.
                "RAY_AUTH_MODE": "token",
                "RAY_AUTH_TOKEN": token,
                "RAY_USAGE_STATS_ENABLED": "0",
                "RAY_DEDUP_LOGS": "0",
                # Not another cluster's address.
                "RAY_ADDRESS": "",
            },
            # Ctrl-C reaches only the coordinator, which ends the cluster.
            start_new_session=True,
        )
        assert self._process.stdin is not None
        setup = RayManagerSetup(control, self._folder.name, cpus)
        self._process.stdin.write(pickle.dumps(setup))
        self._process.stdin.flush()

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        """Ends all processes and waits for them."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._folder.cleanup()


def main() -> None:
    """Entry point of the manager process."""
    if not engine_messages.are_wanted(os.environ):
        # Ray writes the output of the processes here.
        sys.stdout, sys.stderr = map(
            engine_messages.WithoutEngineLines, (sys.stdout, sys.stderr)
        )
    setup: RayManagerSetup = pickle.load(sys.stdin.buffer)
    gone = threading.Event()
    connection = Connection(setup.control, None, "the coordinator")

    def watch_input() -> None:
        sys.stdin.buffer.read()
        gone.set()

    threading.Thread(target=watch_input, daemon=True).start()
    ray = _start_ray(setup)
    try:
        _manage(ray, connection, gone)
    finally:
        connection.close()
        ray.shutdown()
        sys.stdout.flush()
        # Threads of Ray may block a regular exit.
        os._exit(0)


def _start_ray(setup: RayManagerSetup) -> Any:
    import ray
    from ray._private import services
    from ray._private.node import Node

    # No dashboard and autoscaler, two processes that take 1 s each to start and 200 MB.
    node: Any = Node
    node.start_monitor = lambda self: None
    node.start_api_server = lambda self, **options: None
    # Ray 2.60 replaces a loopback address by one of the network.
    services.resolve_ip_for_localhost = lambda host: host
    services.get_node_ip_address = lambda *args, **kwargs: "127.0.0.1"
    ray.init(
        address="local",
        num_cpus=setup.cpus,
        include_dashboard=False,
        logging_level=logging.ERROR,
        object_store_memory=_STORE_BYTES,
        _node_ip_address="127.0.0.1",
        _temp_dir=setup.folder,
        # Ray's default is niceness 15.
        _system_config={"worker_niceness": 0},
    )
    return ray


def _manage(ray: Any, connection: Connection, gone: threading.Event) -> None:
    host = ray.remote(num_cpus=0, max_restarts=0)(_Host)
    running: dict[Any, tuple[ProcessStart, Any, int]] = {}

    def post(kind: str, value: Any) -> None:
        connection.post((0, (kind, value)))

    post("manager", os.getpid())
    while not gone.is_set():
        message = connection.receive(0.02 if running else 0.2)
        if message is not None:
            _, (kind, value) = message
            if kind == "start":
                actor = host.remote()
                ended = actor.run.remote(value.entry, value.arguments)
                running[ended] = (value, actor, 0)
            elif kind == "kill":
                _kill(ray, running, value)
        if not running:
            continue
        ended_now, _ = ray.wait(list(running), num_returns=1, timeout=0)
        for reference in ended_now:
            start, _, _ = running.pop(reference)
            try:
                ray.get(reference)
                reason = "it ended"
            except Exception as error:  # Raised by the process, or by Ray if it died.
                reason = str(error).strip().splitlines()[0][:500]
                cause = getattr(error, "cause", None)
                if cause is not None:
                    reason = f"{type(cause).__name__}: {cause}"
            post("ended", (start.kind, start.index, start.incarnation, reason))
    for _, actor, _ in running.values():
        ray.kill(actor)


def _kill(ray: Any, running: dict[Any, Any], value: tuple[str, int, int, int]) -> None:
    """Kills a process, also if it is stopped."""
    kind, index, incarnation, pid = value
    for start, actor, _ in running.values():
        if (start.kind, start.index, start.incarnation) == (kind, index, incarnation):
            if pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            ray.kill(actor)


class _Host:
    """A process of the cluster, as a Ray actor."""

    def run(self, entry: str, arguments: dict[str, Any]) -> None:
        from keras_strategies.processes.keras_import import (
            import_keras,
        )

        import_keras()
        module, function = entry.split(":")
        getattr(importlib.import_module(module), function)(**arguments)


def environment(threads: int) -> dict[str, str]:
    """Environment variables of a cluster's processes."""
    import keras

    found = {
        **QUIET,
        **os.environ,
        "KERAS_BACKEND": keras.backend.backend(),
        # No mapping of memory for the large arrays of each step.
        "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
        "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
        "MALLOC_TOP_PAD_": str(16 << 20),
        "PYTHONUNBUFFERED": "1",
    }
    found.setdefault("OMP_NUM_THREADS", str(threads))
    # Threads of XLA on CPUs, and of TensorFlow.
    for name in ("NPROC", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"):
        found.setdefault(name, str(threads))
    found.pop("TF_CONFIG", None)
    return found


def private_folder() -> tempfile.TemporaryDirectory[str]:
    """A folder for this user only, with a path short enough for sockets."""
    root = Path(tempfile.gettempdir())
    # Paths of Unix sockets have 107 characters at most.
    return tempfile.TemporaryDirectory(
        prefix="ks-", dir=root if len(str(root)) < 60 else "/tmp"
    )


def wait_for(condition: threading.Condition, holds: Any, seconds: float) -> bool:
    """Waits on a condition until a deadline."""
    until = time.monotonic() + seconds
    while not holds():
        left = until - time.monotonic()
        if left <= 0:
            return False
        condition.wait(left)
    return True


if __name__ == "__main__":
    main()
