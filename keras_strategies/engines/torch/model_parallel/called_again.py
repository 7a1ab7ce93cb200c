"""Functions that the backward pass calls again, to save memory."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any


class _Thread(threading.local):
    #: Makes the context of the layer call in which this thread is; None outside.
    context: Callable[[], contextlib.AbstractContextManager[Any]] | None = None


_thread = _Thread()


@contextlib.contextmanager
def entered_again_by(
    context: Callable[[], contextlib.AbstractContextManager[Any]],
) -> Iterator[None]:
    """A context in which functions that are called again take `context()` with them."""
    before, _thread.context = _thread.context, context
    try:
        yield
    finally:
        _thread.context = before


def called_again(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that is called again in the backward pass, in its own context."""
    context = _thread.context
    if context is None:
        return function

    def called(*args: Any, **kwargs: Any) -> Any:
        if _thread.context is not None:
            return function(*args, **kwargs)
        with context():
            return function(*args, **kwargs)

    return called
