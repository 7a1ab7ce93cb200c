"""Functions that the backward pass calls again, to save memory (`keras.remat`)."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

Context = Callable[[], contextlib.AbstractContextManager[Any]]


class _Thread(threading.local):
    #: The context of functions that are called again, and whether a program is traced.
    recomputation: tuple[Context, bool] | None = None


_thread = _Thread()


@contextlib.contextmanager
def recomputing_in(context: Context, *, is_traced: bool = False) -> Iterator[None]:
    """A layer call whose functions of `keras.remat` are called again in `context()`.

    Args:
        context: callable that makes the context.
        is_traced: bool, whether a program is traced. It calls the functions once, in
            `context()`, and its backward pass computes their results again.
    """
    before, _thread.recomputation = _thread.recomputation, (context, is_traced)
    try:
        yield
    finally:
        _thread.recomputation = before


def rematerialized(
    original: Callable[..., Any], function: Callable[..., Any]
) -> Callable[..., Any]:
    """A function that is called again in the backward pass, in its own context.

    Args:
        original: `keras.remat`.
        function: the function.
    """
    if _thread.recomputation is None:
        return original(function)  # type: ignore[no-any-return]
    context, is_traced = _thread.recomputation

    def called(*args: Any, **kwargs: Any) -> Any:
        # The first call is in the layer call, which has entered what it needs.
        is_first = not is_traced and _thread.recomputation is not None
        with contextlib.nullcontext() if is_first else context():
            return function(*args, **kwargs)

    # Calls of Keras's functions are compared with eager ones, so a trace makes them.
    wrapped = original(function if is_traced else called)
    return called if is_traced else wrapped  # type: ignore[no-any-return]
