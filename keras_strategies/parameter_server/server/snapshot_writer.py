"""Child process that writes a snapshot while its server goes on.

The child is forked between two requests, so its copy of the memory is the state at one
moment; the kernel copies a page when the server changes it. The child writes a file
that has no name yet, and flushes it. The server gives it its name, so that the child of
a server that was killed, which ends with it, publishes nothing.

Other threads do not exist in the child. It runs Python and writes bytes: it calls no
framework, allocates no lock of theirs, and ends without finalizers.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from keras_strategies.processes.orphan_guard import end_with_parent
from keras_strategies.training.saving.atomic_files import atomic_file

#: Exit code for other errors than an `OSError`, whose number is the exit code.
_FAILED = 255
#: Below the server's priority: its requests come first.
_NICE = 10


class ForkedWrite:
    """A file that a child process writes.

    Args:
        target: the path that the file gets when it is complete.
        write: writes the file at a path, in the child.

    Raises:
        OSError: if the folder cannot be written or the process cannot be forked.
    """

    def __init__(self, target: Path, write: Callable[[Path], None]):
        with contextlib.ExitStack() as stack:
            part = stack.enter_context(atomic_file(target))
            self._pid = _fork(lambda: write(part), part)
            self._file = stack.pop_all()

    def finish(self, waits: bool) -> bool:
        """Gives the file its name if it is complete; returns whether it is.

        Args:
            waits: whether to wait for the child.

        Raises:
            OSError: if it could not be written; nothing is left of it.
        """
        pid, status = os.waitpid(self._pid, 0 if waits else os.WNOHANG)
        if pid == 0:
            return False
        with self._file:
            code = os.waitstatus_to_exitcode(status)
            if code < 0:
                name = signal.Signals(-code).name
                raise OSError(errno.EIO, f"its writer was ended by {name}")
            if code == _FAILED:
                raise OSError(errno.EIO, "its writer failed: see this server's output")
            if code:
                raise OSError(code, os.strerror(code))
        return True

    def abort(self) -> None:
        """Ends the child; nothing is left of the file."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        with contextlib.suppress(OSError):
            self.finish(waits=True)


def _fork(write: Callable[[], None], part: Path) -> int:
    parent = os.getpid()
    with warnings.catch_warnings():
        # JAX and Python warn of threads that the child does not have.
        warnings.simplefilter("ignore")
        pid = os.fork()
    if pid == 0:
        _run_child(write, part, parent)
    return pid


def _run_child(write: Callable[[], None], part: Path, parent: int) -> NoReturn:
    code = _FAILED
    try:
        # Finalizers of the server's objects would close its connections.
        gc.disable()
        end_with_parent(parent)
        os.nice(_NICE)
        write()
        with part.open("rb") as file:
            os.fsync(file.fileno())
        code = 0
    except OSError as error:
        code = error.errno or _FAILED
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)
