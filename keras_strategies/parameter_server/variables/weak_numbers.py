"""Numbers of objects, which are released with the objects."""

from __future__ import annotations

import collections
import types
import weakref
from collections.abc import Hashable
from typing import Any


class WeakNumbers:
    """Numbers of objects by identity, without references to the objects.

    Objects may be garbage-collected in any thread, with any lock held: this only
    queues their numbers for `take_released`.
    """

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._released: collections.deque[int] = collections.deque()
        # Objects without weak references.
        self._strong: list[Any] = []

    def get(self, made: Any) -> int | None:
        """The number of an object; None without one."""
        return self._numbers.get(_identity(made)[0])

    def set(self, made: Any, number: int) -> None:
        """Sets the number of an object, instead of an earlier one."""
        key, owner = _identity(made)
        is_new = key not in self._numbers
        self._numbers[key] = number
        if not is_new:
            return
        try:
            end = weakref.finalize(owner, _release, self._numbers, self._released, key)
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


def _identity(made: Any) -> tuple[Hashable, Any]:
    """A key of an object, and the object with its lifetime.

    A method is another object each time that it is read from its own.
    """
    if isinstance(made, types.MethodType):
        return (id(made.__self__), id(made.__func__)), made.__self__
    return id(made), made


def _release(
    numbers: dict[Hashable, int], released: collections.deque[int], key: Hashable
) -> None:
    released.append(numbers.pop(key))
