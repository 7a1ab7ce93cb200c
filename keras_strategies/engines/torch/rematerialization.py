"""Functions that the backward pass calls again, to save memory (`keras.remat`)."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any


class _Thread(threading.local):
    #: Makes the context of the layer call in which this thread is; None outside.
    context: Callable[[], contextlib.AbstractContextManager[Any]] | None = None
    #: Context of a function whose program computes its results again; None outside of
    #: the trace of a program.
    in_program: Callable[[], contextlib.AbstractContextManager[Any]] | None = None


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


@contextlib.contextmanager
def computed_again_in_program(
    context: Callable[[], contextlib.AbstractContextManager[Any]],
) -> Iterator[None]:
    """A trace of a program, in which functions are called once, in `context()`."""
    before, _thread.in_program = _thread.in_program, context
    try:
        yield
    finally:
        _thread.in_program = before


def rematerialized(
    original: Callable[..., Any], function: Callable[..., Any]
) -> Callable[..., Any]:
    """A function that is called again in the backward pass, in its own context.

    Args:
        original: `keras.remat`.
        function: the function.
    """
    in_program, context = _thread.in_program, _thread.context
    if in_program is not None:
        original(function)  # Calls of Keras's functions are compared with eager ones.

        def traced(*args: Any, **kwargs: Any) -> Any:
            with in_program():
                return function(*args, **kwargs)

        return traced
    if context is None:
        return original(function)  # type: ignore[no-any-return]

    def called(*args: Any, **kwargs: Any) -> Any:
        if _thread.context is not None:
            return function(*args, **kwargs)
        with context():
            return function(*args, **kwargs)

    return original(called)  # type: ignore[no-any-return]
