"""Outermost layer calls of a thread, which a function may replace."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

from keras_strategies.keras_compat import patching

#: `route(layer, call, args, kwargs)` stands in for `layer(*args, **kwargs)`; `call` is
#: the layer's original `__call__`, bound to it.
CallRoute = Callable[[Any, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


class _Route(threading.local):
    # The function that outermost layer calls of this thread go through.
    call: CallRoute | None = None


thread_route = _Route()


class layer_calls_through:
    """Sends this thread's outermost layer calls to `route`; None calls layers again.

    A context manager.
    """

    def __init__(self, route: CallRoute | None):
        self._route = route

    def __enter__(self) -> None:
        if self._route is not None:
            patching.install("routes")
            patching.install("replicas")
            patching.install("row parts")
        self._previous = thread_route.call
        thread_route.call = self._route

    def __exit__(self, *exception: Any) -> None:
        thread_route.call = self._previous


class noting_layer_calls(layer_calls_through):
    """Calls `note(layer, outputs)` after each layer call of this thread.

    A context manager. The calls go where they go without it.
    """

    def __init__(self, note: Callable[[Any, Any], None]):
        before = thread_route.call

        def route(layer: Any, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            if before is None:
                outputs = call(*args, **kwargs)
            else:
                outputs = before(layer, call, args, kwargs)
            note(layer, outputs)
            return outputs

        super().__init__(route)


@contextlib.contextmanager
def layer_calls_seen_by(route: CallRoute) -> Iterator[None]:
    """Sends this thread's outermost layer calls to `route` in a block of code.

    Unlike `layer_calls_through` it leaves nothing replaced.
    """
    with patching.installed_while("routes"):
        previous, thread_route.call = thread_route.call, route
        try:
            yield
        finally:
            thread_route.call = previous


def routed_call(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    route = thread_route.call
    if route is None:
        return original(self, *args, **kwargs)
    return route(self, functools.partial(original, self), args, kwargs)
