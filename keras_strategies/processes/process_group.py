"""Process groups: start of a process in a group of its own, signals and end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

#: Command of the guard process, which starts in milliseconds.
GUARD = [sys.executable, "-I", "-S", str(Path(__file__).with_name("orphan_guard.py"))]
#: Seconds for the end of a killed process: it ends at once, unless a disk or a driver
#: blocks it in the kernel.
KILL_SECONDS = 10.0


class ProcessGroup:
    """A process that leads a group and a session of its own, without a terminal.

    Other members of the group may outlive it.

    Args:
        command: list of str, the program and its arguments.
        environment: dict of str, its environment variables.
        stdin, stdout, stderr: as for `subprocess.Popen`; without standard input by
            default.
        pass_fds: sequence of int, file descriptors that it inherits.
        is_text: bool, whether pipes have lines of text instead of bytes.
        ends_with_parent: bool, whether the kernel kills it when this thread ends, on
            Linux. False for a process that ends with its standard input.

    Attributes:
        pid: int, the number of the process and of the group.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        *,
        stdin: int = subprocess.DEVNULL,
        stdout: int | None = None,
        stderr: int | IO[Any] | None = None,
        pass_fds: Sequence[int] = (),
        is_text: bool = False,
        ends_with_parent: bool = True,
    ):
        guard = [*GUARD, "run", str(os.getpid())] if ends_with_parent else []
        self._process: subprocess.Popen[Any] = subprocess.Popen(
            [*guard, *command],
            env=None if environment is None else dict(environment),
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            pass_fds=pass_fds,
            text=is_text,
            bufsize=1 if is_text else -1,
            start_new_session=True,
        )
        self.pid = self._process.pid
        self.stdin, self.stdout = self._process.stdin, self._process.stdout
        self.stderr = self._process.stderr

    @property
    def exists(self) -> bool:
        """Whether the group has a member, which may be a child of its leader."""
        try:
            os.killpg(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True

    def send(self, number: int) -> None:
        """Sends a signal to all members."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def wait(self, seconds: float | None = None) -> int | None:
        """Waits for the end of the leader.

        Args:
            seconds: float; None to wait as long as it takes.

        Returns:
            int, its exit code, or minus the number of a signal; None if it runs on.
        """
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def close(self, grace_seconds: float) -> None:
        """Closes standard input, and kills the group if it runs on."""
        if self.stdin is not None:
            with suppress(OSError):
                self.stdin.close()
        if self.wait(grace_seconds) is None:
            self.send(signal.SIGKILL)
            self.wait(KILL_SECONDS)
        if self.stdout is not None:
            self.stdout.close()
