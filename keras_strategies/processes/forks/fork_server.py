"""Fork server: a process that imports Keras and forks itself for each task.

Requests arrive on a socket: JSON of the function and its arguments, with three file
descriptors, for standard output, standard error and the task's status. The fork writes
its process id to the status, and the server writes its exit code when it has ended,
each as eight bytes; a process id of 0 means that the fork has failed. The server and
its forks end when the other end of the socket is closed, and with the thread that
started the server.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import struct
import sys
from collections.abc import Sequence
from typing import Any

from keras_strategies.processes.function_command import function_command
from keras_strategies.processes.keras_import import import_keras
from keras_strategies.processes.orphan_guard import end_with_parent
from keras_strategies.processes.process_group import fork_group

#: Process id or exit code in a status.
STATUS = struct.Struct("<q")
_MAX_REQUEST = 1 << 20
_SIGNALS = (signal.SIGCHLD, signal.SIGTERM)
# Devices that are useless in forks once a driver has been initialized.
_DRIVERS = ("/dev/accel", "/dev/dri", "/dev/kfd", "/dev/nvidia", "/dev/vfio")


def main(control: int, modules: Sequence[str]) -> None:
    """Imports Keras and modules, then serves; returns in forks too.

    Args:
        control: int, file descriptor of the socket for requests.
        modules: list of str, imported before the first fork.
    """
    import_keras()
    for module in modules:
        importlib.import_module(module)
    call = _ForkServer(socket.socket(fileno=control)).serve()
    if call is not None:
        module, function = call["entry"].split(":")
        getattr(importlib.import_module(module), function)(**call["arguments"])


def can_fork() -> bool:
    """Whether forks of this process can compute: no threads, no open accelerator."""
    if len(os.listdir("/proc/self/task")) > 1:
        return False
    opened = (_target(name) for name in os.listdir("/proc/self/fd"))
    return not any(target.startswith(_DRIVERS) for target in opened)


def _target(name: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{name}")
    except OSError:  # The descriptor of the listed folder.
        return ""


class _ForkServer:
    """Serves requests and reaps forks, in the only thread.

    Args:
        control: the socket for requests.
    """

    def __init__(self, control: socket.socket):
        self._control = control
        self._statuses: dict[int, int] = {}
        # Receives the number of each signal.
        self._signals, self._wake = socket.socketpair()
        self._wake.setblocking(False)
        self._is_forkable = can_fork()

    def serve(self) -> dict[str, Any] | None:
        """Forks until the socket ends; returns the call in a fork, else None."""
        for number in _SIGNALS:
            signal.signal(number, lambda number, frame: None)
        signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        # Not SIGKILL: nothing would wait for forks that end with this process.
        end_with_parent(os.getppid(), signal.SIGTERM)
        _freeze_objects()
        while True:
            ready, _, _ = select.select([self._control, self._signals], [], [])
            if self._signals in ready:
                if signal.SIGTERM in self._signals.recv(4096):
                    break
                self._reap()
            if self._control in ready:
                request, descriptors, _, _ = socket.recv_fds(
                    self._control, _MAX_REQUEST, 3
                )
                if not request:
                    break
                if (call := self._fork(request, descriptors)) is not None:
                    return call
        self._end()
        return None

    def _fork(self, request: bytes, descriptors: list[int]) -> dict[str, Any] | None:
        """Forks; returns the call in the fork."""
        out, err, status = descriptors
        try:
            if pid := fork_group(stdout=out, stderr=err):
                self._statuses[pid] = status
                return None
        except OSError as error:
            os.write(err, f"The fork server cannot fork: {error}\n".encode())
            _report(status, 0)
            return None
        finally:
            os.close(out)
            os.close(err)
        self._close()
        _report(status, os.getpid())
        call: dict[str, Any] = json.loads(request)
        if not self._is_forkable:
            entry = "keras_strategies.processes.keras_import:call_with_keras"
            command = function_command(entry, call)
            os.execv(command[0], command)
        _reseed_numpy()
        return call

    def _close(self) -> None:
        """Closes the server's descriptors in a fork."""
        signal.set_wakeup_fd(-1)
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        for each in (self._control, self._signals, self._wake):
            each.close()
        for status in self._statuses.values():
            os.close(status)

    def _reap(self, options: int = os.WNOHANG) -> None:
        """Reports the forks that have ended; with 0, waits for the ends of all."""
        for pid in list(self._statuses):
            found, code = os.waitpid(pid, options)
            if found:
                _report(self._statuses.pop(pid), os.waitstatus_to_exitcode(code))

    def _end(self) -> None:
        """Kills the forks, and waits for their ends."""
        for pid in self._statuses:
            # One that was just forked does not lead a group yet.
            for kill in (os.killpg, os.kill):
                with contextlib.suppress(ProcessLookupError):
                    kill(pid, signal.SIGKILL)
        self._reap(0)


def _report(status: int, number: int) -> None:
    """Writes a process id or an exit code, and closes the status here."""
    with contextlib.suppress(BrokenPipeError):
        os.write(status, STATUS.pack(number))
    os.close(status)


def _freeze_objects() -> None:
    """Excludes objects from garbage collection, which would copy the shared memory."""
    gc.collect()
    gc.freeze()


def _reseed_numpy() -> None:
    """Reseeds NumPy's global generator, which is random in a new process."""
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
