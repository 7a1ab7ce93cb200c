"""Progress bar of a transfer between this process and the parameter servers."""

from __future__ import annotations

import time
from typing import Any, Self

import keras

from keras_strategies.cluster.startup_report import Progress

#: Seconds before a bar is shown.
_QUIET_SECONDS = 3.0


class TransferProgress:
    """Context manager: a bar of Keras, for what takes more than some seconds.

    Args:
        what: str, such as `"creating embedding/embeddings"`.
        nbytes: int, bytes of the transfer.
    """

    def __init__(self, what: str, nbytes: int):
        self._what = what
        self._nbytes = nbytes
        self._report = Progress()
        self._done = 0
        self._begun = time.monotonic()
        self._bar: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, *error: Any) -> None:
        if self._bar is not None and kind is None:
            self._bar.update(self._bar.target, finalize=True)

    def advance(self, nbytes: int) -> None:
        """Shows that further bytes are done."""
        self._done += nbytes
        if self._bar is None and time.monotonic() - self._begun >= _QUIET_SECONDS:
            self._report.report(self._what)
            self._bar = keras.utils.Progbar(self._nbytes >> 20, unit_name="MB")
        if self._bar is not None and self._done < self._nbytes:
            self._bar.update(self._done >> 20, finalize=False)
