"""Startup report of a cluster: ready processes and elapsed time."""

from __future__ import annotations

import logging
import sys
import time

_logger = logging.getLogger("keras_strategies.cluster")


class Progress:
    """Reports the progress of a cluster's start, with seconds since it began.

    Lines go to the logger `keras_strategies.cluster` at the level INFO, where that is
    enabled. Where no level is set they go to stderr, because a start takes seconds;
    `logging.getLogger("keras_strategies").setLevel("WARNING")` silences them.
    """

    def __init__(self) -> None:
        self._began = time.monotonic()

    def report(self, text: str) -> None:
        """Reports one event.

        Args:
            text: str, such as `"worker 1 is ready, 2 of 3"`.
        """
        line = f"{text} ({time.monotonic() - self._began:.1f} s)"
        if _logger.isEnabledFor(logging.INFO):
            _logger.info(line)
        elif not _is_configured():
            print(f"keras_strategies: {line}", file=sys.stderr, flush=True)


def _is_configured() -> bool:
    """Whether a log level is set for this package."""
    logger: logging.Logger | None = _logger
    while logger is not None and logger is not logging.root:
        if logger.level != logging.NOTSET:
            return True
        logger = logger.parent
    return False
