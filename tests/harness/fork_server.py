"""Processes that have imported Keras and fork themselves for each script.

A server has one thread and uses no device, so that its forks can do anything. The
servers of a whole run, one for each backend, belong to `tests/run.py`, which names the
folder of their sockets in KS_FORK_SERVERS. Without it, a process that forks scripts
starts the server of the backend itself.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

# Loads nothing of the library that uses Keras.
from keras_strategies.processes.orphan_guard import end_with_parent
from keras_strategies.processes.process_group import ProcessGroup

#: The folder with the sockets of a run's servers.
SERVERS = "KS_FORK_SERVERS"
#: Whether TensorFlow runs graphs as they were traced; see `harness.tensorflow_graphs`.
PLAIN_GRAPHS = "KS_PLAIN_GRAPHS"
# How often a server looks for scripts that have ended, in seconds.
_TICK = 0.02
# What scripts find imported: Keras, of the library only what starts processes; or also
# all of `keras_strategies` and pytest.
_KINDS = ("keras", "strategies")
# A test may change the environment before it starts the first script.
_ENVIRONMENT = dict(os.environ)


class ForkServer:
    """The process of one backend that has imported Keras; it forks another, when that
    is used, which imports `keras_strategies` and pytest, too.

    Args:
        backend: str, the backend.
        folder: Path of the folder for its sockets.
        environment: dict, instead of this process's environment.
        errors: Path of a file for the output of its imports; otherwise they print here.
    """

    def __init__(
        self,
        backend: str,
        folder: Path,
        environment: Mapping[str, str],
        errors: Path | None = None,
    ) -> None:
        listeners = [_listen(_socket_of(folder, backend, kind)) for kind in _KINDS]
        numbers = [listener.fileno() for listener in listeners]
        with contextlib.ExitStack() as stack:
            for listener in listeners:
                stack.enter_context(listener)
            log = stack.enter_context(errors.open("wb")) if errors else None
            self._process = ProcessGroup(
                [sys.executable, "-m", "harness.fork_server", *map(str, numbers)],
                {
                    **environment,
                    "KERAS_BACKEND": backend,
                    "PYTHONPATH": _python_path(environment),
                    # Libraries that start threads when they are imported cannot be
                    # forked; the last one is PyArrow's, which pandas imports.
                    "OMP_NUM_THREADS": "1",
                    "OPENBLAS_NUM_THREADS": "1",
                    "JE_ARROW_MALLOC_CONF": "background_thread:false",
                },
                pass_fds=numbers,
                # It ends when this is closed, also because its owner was killed.
                stdin=subprocess.PIPE,
                stderr=log,
                ends_with_parent=False,
            )
        self.pid = self._process.pid

    def close(self) -> None:
        """Ends the server and all scripts that are left."""
        self._process.close(20)


def _python_path(environment: Mapping[str, str]) -> str:
    """The folders of an environment, and those where this process finds modules."""
    given = environment.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join(filter(None, dict.fromkeys([*given, *sys.path])))


def _socket_of(folder: Path, backend: str, kind: str) -> Path:
    return folder / f"{backend}-{kind}"


def _listen(path: Path) -> socket.socket:
    """A socket on which orders wait until the server has imported everything."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen(64)
    return listener


# By process, because a fork inherits them and has to start servers of its own.
_own: dict[tuple[int, str], tuple[ForkServer, tempfile.TemporaryDirectory[str]]] = {}


def find(backend: str, imports_strategies: bool) -> Path:
    """The socket of a server, which is started if there is none.

    Args:
        backend: str, its backend.
        imports_strategies: bool, whether it has imported `keras_strategies`.
    """
    kind = _KINDS[imports_strategies]
    if shared := os.environ.get(SERVERS):
        path = _socket_of(Path(shared), backend, kind)
        if path.exists():
            return path
    key = (os.getpid(), backend)
    if key not in _own:
        folder = tempfile.TemporaryDirectory(prefix="ks-fork-")
        _own[key] = ForkServer(backend, Path(folder.name), _ENVIRONMENT), folder
    return _socket_of(Path(_own[key][1].name), backend, kind)


def pids() -> set[int]:
    """The servers that this process has started; they serve it to its end."""
    return {server.pid for (pid, _), (server, _) in _own.items() if pid == os.getpid()}


def close() -> None:
    """Ends the servers that this process has started."""
    for key in [key for key in _own if key[0] == os.getpid()]:
        server, folder = _own.pop(key)
        server.close()
        folder.cleanup()


def end_of(log: Path) -> Path:
    """The file with the exit code of a script and the time of its end."""
    return log.with_suffix(".end")


# --- The process of a server --------------------------------------------------


@dataclass(frozen=True)
class _Script:
    """A script that has been forked: its log, and the connection that ordered it."""

    log: Path
    client: TextIO


class _Orders:
    """Takes orders from the connections of a socket, and forks.

    Args:
        listener: the socket.
        full: the socket of the server that imports more; it is forked from this one
            when someone connects there.
    """

    def __init__(
        self, listener: socket.socket, full: socket.socket | None = None
    ) -> None:
        self._listener = listener
        self._full = full
        self._clients: dict[socket.socket, TextIO] = {}
        self._scripts: dict[int, _Script] = {}

    def serve(self) -> str | None:
        """Forks until standard input ends; returns in a fork with its script."""
        while True:
            full = [self._full] if self._full else []
            sources = [sys.stdin, self._listener, *full, *self._clients]
            for source in select.select(sources, [], [], _TICK)[0]:
                if source is sys.stdin:
                    self._end()
                    return None
                if source is self._listener:
                    client, _ = self._listener.accept()
                    self._clients[client] = client.makefile("rw")
                elif source is self._full:
                    if (server := self._fork_full(source)) is not None:
                        return server.serve()
                elif (script := self._take(source)) is not None:
                    return script
            self._reap()

    def _fork_full(self, listener: socket.socket) -> _Orders | None:
        """The server that imports more, in the process that was forked for it."""
        if _fork_group():
            self._full = None
            listener.close()
            return None
        self._full = None
        self._close()
        if not _keras_starts_a_driver():
            _import_strategies()
        _ready_to_fork()
        return _Orders(listener)

    def _end(self) -> None:
        """Kills all scripts; returns when all processes are gone."""
        self._kill(list(self._scripts))
        with contextlib.suppress(ChildProcessError):
            while True:
                os.wait()

    def _take(self, source: socket.socket) -> str | None:
        """Takes one order; returns in the fork with its script."""
        client = self._clients[source]
        line = ""
        with contextlib.suppress(ConnectionError):
            line = client.readline()
        if not line:
            self._drop(source)
            return None
        order = json.loads(line)
        if "kill" in order:
            pid = order["kill"]
            self._kill([pid])
        else:
            try:
                pid = _fork_script(Path(order["log"]))
            except FileNotFoundError:  # The folder of a client that has ended.
                self._drop(source)
                return None
            if not pid:
                self._close()
                _become(order)
                return str(sys.argv[0])
            self._scripts[pid] = _Script(Path(order["log"]), client)
        with contextlib.suppress(ConnectionError):
            print(pid, file=client, flush=True)
        return None

    def _drop(self, source: socket.socket) -> None:
        """Closes a connection, and kills the scripts that it has ordered."""
        client = self._clients.pop(source)
        self._kill([n for n, one in self._scripts.items() if one.client is client])
        source.close()

    def _kill(self, pids: list[int]) -> None:
        """Kills scripts that have not been reaped, with their groups."""
        for pid in set(pids) & self._scripts.keys():
            try:
                os.killpg(pid, signal.SIGKILL)
            except ProcessLookupError:
                # Just forked, and not yet the leader of a group.
                os.kill(pid, signal.SIGKILL)

    def _close(self) -> None:
        """Closes everything in a fork, so that the other ends notice a server's end."""
        for one in (self._listener, self._full, *self._clients):
            if one is not None:
                os.close(one.detach())

    def _reap(self) -> None:
        for pid in list(self._scripts):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                end = json.dumps([os.waitstatus_to_exitcode(status), time.time()])
                file = end_of(self._scripts.pop(pid).log)
                # The folder may be gone, if nothing waits for the end.
                with contextlib.suppress(FileNotFoundError):
                    file.with_suffix(".part").write_text(end)
                    file.with_suffix(".part").rename(file)


def _fork_group(stdin: int = 0, stdout: int = 1, stderr: int = 2) -> int:
    """Forks this process, which must have one thread only.

    The fork leads a group and a session of its own, without a terminal, and the kernel
    kills it when this process ends, on Linux. It inherits all file descriptors.

    Args:
        stdin, stdout, stderr: int, file descriptors that become its standard streams;
            by default those of this process.

    Returns:
        int, the process id of the fork; 0 in the fork.

    Raises:
        OSError: if the system cannot fork.
    """
    parent = os.getpid()
    pid = os.fork()
    if not pid:
        end_with_parent(parent)
        os.setsid()
        for number, descriptor in enumerate((stdin, stdout, stderr)):
            os.dup2(descriptor, number)
    return pid


def _fork_script(log: Path) -> int:
    """Forks a process without input that writes to a log; 0 in the fork."""
    with open(os.devnull, "rb") as null, log.open("wb") as output:
        return _fork_group(null.fileno(), output.fileno(), output.fileno())


def _become(order: Mapping[str, Any]) -> None:
    """Makes this process that of a script."""
    os.environ.update(order["environment"])
    sys.argv[:] = order["arguments"]


def _import_strategies() -> None:
    """Imports of scripts of tests, besides those of Keras."""
    import keras

    import keras_strategies as ks

    importlib.import_module("pytest")
    assert ks.MultiWorkerMirroredStrategy and ks.ParameterServerStrategy
    # What imports more when it is first used; saving looks for TensorFlow.
    keras.saving.serialize_keras_object(keras.layers.Dense(1))


def _ready_to_fork() -> None:
    assert len(os.listdir("/proc/self/task")) == 1, "forks need a single thread"
    # A fork would copy all this memory when it collects garbage at its end.
    gc.collect()
    gc.freeze()
    # Tracing programs makes millions of objects and little garbage.
    gc.set_threshold(100_000, 20, 20)


def _keras_starts_a_driver() -> bool:
    """Whether Keras would start the driver of a GPU, which no fork can use.

    On Torch, where it looks for one when it is imported. Scripts import it themselves.
    """
    has_gpus = shutil.which("nvidia-smi") and os.environ.get(
        "CUDA_VISIBLE_DEVICES", "0"
    )
    return bool(has_gpus) and os.environ["KERAS_BACKEND"] == "torch"


def _main(plain: int, full: int) -> None:
    if _keras_starts_a_driver():
        importlib.import_module("torch")
    else:
        importlib.import_module("keras")
    if os.environ.get(PLAIN_GRAPHS) and os.environ["KERAS_BACKEND"] == "tensorflow":
        importlib.import_module("harness.tensorflow_graphs").set_optimized(False)
    _ready_to_fork()
    listener, other = socket.socket(fileno=plain), socket.socket(fileno=full)
    script = _Orders(listener, other).serve()
    if script is not None:
        importlib.import_module("runpy").run_path(script, run_name="__main__")
        if "keras_strategies.keras_compat" in sys.modules:
            _end_without_freeing()


def _end_without_freeing() -> None:
    """Ends a fork as the interpreter does, but for freeing all modules.

    That would copy memory that it shares with the server: a third of a second. Forks
    that import `keras_strategies` themselves end with it.
    """
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    _main(*map(int, sys.argv[1:]))
