"""Functions that change the process once."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable


def once(function: Callable[[], None]) -> Callable[[], None]:
    """Calls a function for the first call only; calls of other threads wait for it.

    `functools.cache` calls it twice where two threads call it at the same time.
    """
    lock = threading.RLock()
    is_called = False

    @functools.wraps(function)
    def call() -> None:
        nonlocal is_called
        if is_called:
            return
        with lock:
            if not is_called:
                function()
                is_called = True

    return call
