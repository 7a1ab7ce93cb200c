"""Writes snapshots on a thread, concurrently with training."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from keras_strategies.timeline import recording
from keras_strategies.training.resume.snapshot_files import SnapshotDirectory
from keras_strategies.user_warnings import warn_user


class SnapshotWriter:
    """Writes one snapshot at a time.

    Args:
        files: the directory.
    """

    def __init__(self, files: SnapshotDirectory):
        self._files = files
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        #: bool, whether the last snapshot could not be written.
        self.is_failing = False

    @property
    def is_busy(self) -> bool:
        """bool, whether a snapshot is being written."""
        return self._thread is not None and self._thread.is_alive()

    def write(self, state: Any, written: Callable[[], None]) -> None:
        """Begins to write a snapshot, after the one before it; then calls `written`."""
        self.wait()
        # Not a daemon: a process that ends by itself completes the file.
        self._thread = threading.Thread(
            target=self._write, args=(state, written), name="snapshot"
        )
        self._thread.start()

    def wait(self) -> None:
        """Waits until everything is written, and warns of a failure."""
        if self._thread is not None:
            with recording.SAVE:
                self._thread.join()
            self._thread = None
        self.report()

    def report(self) -> None:
        """Warns of the first of several failures in succession."""
        error, self._error = self._error, None
        if error is not None and not self.is_failing:
            self.is_failing = True
            warn_user(
                f"A snapshot could not be written to {str(self._files.directory)!r}: "
                f"{error}. Training continues. Earlier snapshots are intact, and the "
                "next one is written when it is due."
            )

    def _write(self, state: Any, written: Callable[[], None]) -> None:
        try:
            with recording.SAVE:
                self._files.write(state)
        except Exception as error:
            self._error = error
        else:
            self.is_failing = False
            written()
