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
        what: str, such as `"Creating embedding/embeddings"`.
        total: int, parts of it.
        unit: str, what a part is.
    """

    def __init__(self, what: str, total: int, unit: str):
        self._what = what
        self._total = total
        self._unit = unit
        self._report = Progress()
        self._done = 0
        self._begun = time.monotonic()
        self._bar: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, *error: Any) -> None:
        if self._bar is not None and kind is None:
            self._bar.update(self._total, finalize=True)

    def advance(self, parts: int = 1) -> None:
        """Shows that further parts are done."""
        self._done += parts
        if self._bar is None and time.monotonic() - self._begun >= _QUIET_SECONDS:
            self._report.report(self._what)
            self._bar = keras.utils.Progbar(self._total, unit_name=self._unit)
        if self._bar is not None and self._done < self._total:
            self._bar.update(self._done)
