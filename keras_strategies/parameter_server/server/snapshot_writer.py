"""Thread that writes a file while its server goes on.

It ends with the server's process: a file that is not complete then has no name.
"""

from __future__ import annotations

import errno
import os
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from keras_strategies.training.saving.atomic_files import atomic_file


class BackgroundWrite:
    """A file that a thread writes, flushes to disk and gives its name.

    Args:
        target: the path that the file gets when it is complete.
        write: writes an unbuffered file, and calls its second argument now and then,
            which raises if the file is given up.
        then: called when it has its name.
    """

    def __init__(
        self,
        target: Path,
        write: Callable[[BinaryIO, Callable[[], None]], None],
        then: Callable[[], None],
    ):
        self._target = target
        self._write = write
        self._then = then
        self._error: OSError | None = None
        self._is_aborted = False
        self._thread = threading.Thread(
            target=self._run, name=f"write {target.name}", daemon=True
        )
        self._thread.start()

    def _run(self) -> None:
        try:
            with atomic_file(self._target) as part:
                with part.open("wb", buffering=0) as file:
                    self._write(file, self._check)
                self._check()
            self._then()
        except OSError as error:
            self._error = error
        except Exception:
            traceback.print_exc()
            sys.stderr.flush()
            self._error = OSError(
                errno.EIO, "its writer failed: see this server's output"
            )

    def _check(self) -> None:
        if self._is_aborted:
            raise OSError(errno.ECANCELED, os.strerror(errno.ECANCELED))

    def abort(self) -> None:
        """Ends the thread; nothing is left of a file that is not complete."""
        self._is_aborted = True
        self._thread.join()

    def finish(self, waits: bool) -> bool:
        """Whether the file is complete.

        Args:
            waits: bool, whether to wait for it.

        Raises:
            OSError: if it could not be written; nothing is left of it.
        """
        if waits:
            self._thread.join()
        if self._thread.is_alive():
            return False
        if self._error is not None:
            raise self._error
        return True
