"""Waits for collectives of Gloo, which do not all end with their connections.

When one of three workers is killed while another one is stopped, Gloo leaves a send of
the stopped one waiting in about one of ten cases, although its connections are shut
down: until the timeout of the process group, which is minutes. Such a wait is given up
when the group of workers has ended.
"""

from __future__ import annotations

import ctypes
import datetime
from collections.abc import Callable
from typing import Any

#: Time between two looks at the group; a wait is given up at the second one after the
#: end of the group.
LOOK = datetime.timedelta(seconds=1)
# Process groups with a wait that was given up, and the wait. A process group is
# destroyed when its waits have ended, and would block the thread until then.
_given_up: list[tuple[Any, Any]] = []


def wait_for(work: Any, group: Any, has_ended: Callable[[], bool]) -> None:
    """Waits for a collective.

    Args:
        work: the collective.
        group: its process group.
        has_ended: returns whether the group of workers has ended.

    Raises:
        RuntimeError: if it fails, or is given up.
    """
    was_ended = False
    while True:
        try:
            work.wait(LOOK)
            return
        except RuntimeError:
            if work.is_completed():
                work.wait()
                return
            if was_ended:
                _given_up[:] = [each for each in _given_up if not _is_over(each)]
                _given_up.append((group, work))
                raise
            was_ended = has_ended()


def _is_over(given_up: tuple[Any, Any]) -> bool:
    return bool(given_up[1].is_completed())


def keep_to_the_end() -> None:
    """Keeps process groups with open waits from being destroyed with the process."""
    for each in _given_up:
        if not _is_over(each):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(each[0]))
