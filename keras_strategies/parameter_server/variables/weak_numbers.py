"""Numbers of objects, which are released with the objects."""

from __future__ import annotations

import collections
import weakref
from typing import Any


class WeakNumbers:
    """Numbers of objects by identity, without references to the objects.

    Objects may be garbage-collected in any thread, with any lock held: this only
    queues their numbers for `take_released`.
    """

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._released: collections.deque[int] = collections.deque()
        # Objects without weak references.
        self._strong: list[Any] = []

    def get(self, made: Any) -> int | None:
        """The number of an object; None without one."""
        return self._numbers.get(id(made))

    def set(self, made: Any, number: int) -> None:
        """Sets the number of an object, instead of an earlier one."""
        is_new = id(made) not in self._numbers
        self._numbers[id(made)] = number
        if not is_new:
            return
        try:
            end = weakref.finalize(
                made, _release, self._numbers, self._released, id(made)
            )
        except TypeError:
            self._strong.append(made)
        else:
            end.atexit = False

    def take_released(self) -> list[int]:
        """Numbers of objects that have been garbage-collected since the last call."""
        found = []
        while self._released:
            found.append(self._released.popleft())
        return found


def _release(
    numbers: dict[int, int], released: collections.deque[int], key: int
) -> None:
    released.append(numbers.pop(key))
