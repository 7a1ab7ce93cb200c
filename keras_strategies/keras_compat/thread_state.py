"""Keras's state of a thread: scopes, devices and names."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any


def current_stateless_scope() -> Any:
    """The innermost `keras.StatelessScope` of this thread, or None."""
    from keras.src.backend.common.stateless_scope import get_stateless_scope

    return get_stateless_scope()


@contextlib.contextmanager
def outside_stateless_scopes() -> Iterator[None]:
    """A context without a stateless scope: variables themselves are read and assigned.

    Keras 3.15: the global attribute "stateless_scope".
    """
    from keras.src.backend.common import global_state

    scope = global_state.get_global_attribute("stateless_scope")
    global_state.set_global_attribute("stateless_scope", None)
    try:
        yield
    finally:
        global_state.set_global_attribute("stateless_scope", scope)


def thread_state() -> dict[str, Any]:
    """Keras's state of this thread: autocast and name scopes, device, and so on.

    Keras 3.15: `keras.src.backend.common.global_state.GLOBAL_STATE_TRACKER`, a
    `threading.local` that `clear_session` replaces.
    """
    from keras.src.backend.common import global_state

    return dict(vars(global_state.GLOBAL_STATE_TRACKER))


@contextlib.contextmanager
def with_thread_state(state: dict[str, Any]) -> Iterator[None]:
    """A context with another thread's Keras state in this thread."""
    from keras.src.backend.common import global_state

    own = vars(global_state.GLOBAL_STATE_TRACKER)
    saved = dict(own)
    own.clear()
    own.update(state)
    # The call context is that of the thread that calls layers.
    own.pop("current_call_ctx", None)
    try:
        yield
    finally:
        own.clear()
        own.update(saved)


def values_scope(mapping: Iterable[tuple[Any, Any]]) -> Any:
    """A `StatelessScope` in which variables have values of any shape.

    Keras 3.15: `StatelessScope.state_mapping`, from the `id` of a variable.
    """
    import keras

    scope = keras.StatelessScope()
    for variable, value in mapping:
        scope.state_mapping[id(variable)] = value
    return scope
