"""Start of tasks by a fork server, under a `ProcessLauncher`."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import IO, Any

from keras_strategies.processes.forks.fork_server import STATUS
from keras_strategies.processes.function_command import function_command
from keras_strategies.processes.launcher import ProcessLauncher
from keras_strategies.processes.local_cluster import LocalTask, visible_gpus
from keras_strategies.processes.process_group import RunningGroup

_JOB = "fork server"
_ENTRY = "keras_strategies.processes.forks.fork_server:main"


def are_forks_safe(environment: Mapping[str, str]) -> bool:
    """Whether processes may be forked after the import of a framework.

    Not on macOS: its libraries do not work in forks. Not with GPUs: frameworks look
    for them when they are imported, and a driver cannot be used in forks then.
    """
    return sys.platform == "linux" and not visible_gpus(environment)


class ForkedGroup(RunningGroup):
    """A process forked by a fork server, the leader of its group.

    Args:
        stdout, stderr: reading ends of its pipes.
        status: int, file descriptor with its process id and exit code.
    """

    def __init__(self, stdout: IO[bytes], stderr: IO[bytes], status: int):
        self.stdout, self.stderr = self._pipes = stdout, stderr
        self._status = status
        self._code: int | None = None

    def has_started(self) -> bool:
        """Whether the fork was made or, with `pid` 0, has failed."""
        if not self._is_readable(0.0):
            return False
        found = os.read(self._status, STATUS.size)
        if found:
            (self.pid,) = STATUS.unpack(found)
        # Otherwise the server has ended, which the launcher reports.
        return bool(found)

    def wait(self, seconds: float | None = None) -> int | None:
        if self._code is None and self._is_readable(seconds):
            found = os.read(self._status, STATUS.size)
            # The kernel kills it with the server.
            self._code = STATUS.unpack(found)[0] if found else -signal.SIGKILL
            os.close(self._status)
        return self._code

    def _is_readable(self, seconds: float | None) -> bool:
        poll = select.poll()
        poll.register(self._status, select.POLLIN)
        return bool(poll.poll(None if seconds is None else seconds * 1000))

    def close(self) -> None:
        """Discards a process that never started."""
        for pipe in self._pipes:
            pipe.close()
        os.close(self._status)


class ForkLauncher:
    """Forks tasks from a server that starts with the first of them.

    Methods are called by one thread. The tasks of a server end with it, and the next
    task starts another server.

    Args:
        launcher: `ProcessLauncher`, which watches the server and the tasks.
        environment: dict, environment variables of all of them.
        modules: list of str, imported before the first fork.
    """

    def __init__(
        self,
        launcher: ProcessLauncher,
        environment: Mapping[str, str],
        modules: Sequence[str],
    ):
        self._launcher = launcher
        # NumPy starts threads for OpenBLAS when it is imported.
        self._environment = {"OPENBLAS_NUM_THREADS": "1", **environment}
        self._modules = list(modules)
        self._control: socket.socket | None = None
        self._servers = 0
        self._starting: dict[LocalTask, ForkedGroup] = {}
        self._killed: set[LocalTask] = set()

    def start(self, task: LocalTask, entry: str, arguments: Mapping[str, Any]) -> None:
        """Requests a fork for a task; `update` reports its start."""
        if self._control is None:
            self._start_server()
        assert self._control is not None
        pipes = [os.pipe() for _ in range(3)]
        request = json.dumps({"entry": entry, "arguments": dict(arguments)})
        # A server that has just ended is reported by the launcher.
        with suppress(BrokenPipeError, ConnectionResetError):
            writers = [writer for _, writer in pipes]
            socket.send_fds(self._control, [request.encode()], writers)
        for _, writer in pipes:
            os.close(writer)
        (out, _), (err, _), (status, _) = pipes
        group = ForkedGroup(os.fdopen(out, "rb"), os.fdopen(err, "rb"), status)
        self._starting[task] = group

    def _start_server(self) -> None:
        self._control, other = socket.socketpair(type=socket.SOCK_SEQPACKET)
        with other:
            arguments = {"control": other.fileno(), "modules": self._modules}
            command = function_command(_ENTRY, arguments)
            server = LocalTask(_JOB, 0, self._servers)
            self._launcher.start(
                server, command, self._environment, pass_fds=[other.fileno()]
            )
        self._servers += 1

    def kill(self, task: LocalTask) -> None:
        """Kills a task, also one that has not been forked yet."""
        if task in self._starting:
            self._killed.add(task)
        else:
            self._launcher.kill(task)

    def update(self) -> Iterator[tuple[LocalTask, str]]:
        """Watches new forks; yields tasks that could not be forked, with the reason."""
        for task, group in list(self._starting.items()):
            if not group.has_started():
                continue
            del self._starting[task]
            if not group.pid:
                group.close()
                yield task, "it could not be forked"
                continue
            self._launcher.watch(task, group, self._environment)
            if task in self._killed:
                self._launcher.kill(task)
        self._killed &= self._starting.keys()

    def is_server(self, task: LocalTask) -> bool:
        """Whether a task of the launcher is a fork server."""
        return task.job == _JOB

    def server_ended(self, reason: str) -> Iterator[tuple[LocalTask, str]]:
        """Handles the end of the server; yields its pending tasks, with the reason."""
        self._close_control()
        for task, group in self._starting.items():
            group.close()
            yield task, reason
        self._starting.clear()

    def _close_control(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None

    def close(self) -> None:
        """Ends the server and discards tasks that have not been forked."""
        self._close_control()
        for group in self._starting.values():
            group.close()
        self._starting.clear()
