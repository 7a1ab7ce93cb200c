"""Lookups of rows: `ops.take` of a thread, which a function may replace."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from keras_strategies.keras_compat import patching


class _Lookups(threading.local):
    # Stands in for `ops.take` in this thread; None leaves it to Keras.
    take: Callable[..., Any] | None = None


_lookups = _Lookups()


def take(original: Any, x: Any, indices: Any, axis: Any = None) -> Any:
    found = looked_up(x, indices, axis)
    if found is not NotImplemented:
        return found
    return original(x, indices, axis=axis)


def looked_up(x: Any, indices: Any, axis: Any) -> Any:
    """The rows for a lookup in this thread; `NotImplemented` to leave it to Keras."""
    if _lookups.take is None:
        return NotImplemented
    return _lookups.take(x, indices, axis)


@contextlib.contextmanager
def lookups_through(take: Callable[..., Any] | None) -> Iterator[None]:
    """Sends this thread's `ops.take` to `take(x, indices, axis)`.

    It may return `NotImplemented` to leave a call to Keras.
    """
    previous = _lookups.take
    _lookups.take = take
    try:
        with patching.installed_while("lookups"):
            yield
    finally:
        _lookups.take = previous
