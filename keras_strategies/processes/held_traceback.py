"""The traceback of a task, held back until the task has ended.

So the launcher can print a traceback once that several tasks have.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

#: First line of a traceback.
HEADER = "Traceback (most recent call last):"
# Seconds between a traceback and the end of its process; later, the process goes on.
_SECONDS = 5.0


class HeldTraceback:
    """Standard error of a task from the first line of a traceback on.

    Args:
        write: function of a line, for lines of a task that goes on.
    """

    def __init__(self, write: Callable[[str], None]):
        self._write = write
        self._lines: list[str] = []
        self._timer: threading.Timer | None = None
        self._lock = threading.Lock()

    def takes(self, line: str) -> bool:
        """Holds a line that belongs to a traceback; False if it does not."""
        with self._lock:
            if self._timer is None:
                if line != HEADER:
                    return False
                self._timer = threading.Timer(_SECONDS, self.release)
                self._timer.daemon = True
                self._timer.start()
            self._lines.append(line)
            return True

    def take(self) -> str:
        """The text that is held, "" without one; nothing is held any more."""
        with self._lock:
            return "\n".join(self._clear())

    def release(self) -> None:
        """Writes what is held."""
        with self._lock:
            for line in self._clear():
                self._write(line)

    def _clear(self) -> list[str]:
        if self._timer is not None:
            self._timer.cancel()
        lines, self._lines, self._timer = self._lines, [], None
        return lines
