"""Keras's state of a thread: scopes, devices and names."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

#: What scopes of strategies set in Keras's state: its distribution on JAX, its device
#: on Torch.
_OF_SCOPES = ("distribution", "torch_device")
#: Stacks of open scopes, which Keras changes in place.
_STACKS = ("name_scope_stack", "remat_scope_stack")


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
    # Threads at the same time open scopes of their own.
    own.update({name: list(state.get(name) or ()) for name in _STACKS})
    # The call context is that of the thread that calls layers.
    own.pop("current_call_ctx", None)
    try:
        yield
    finally:
        own.clear()
        own.update(saved)


@dataclass
class _ScopeState:
    tracker: Any
    values: dict[str, Any]


class _Scopes(threading.local):
    def __init__(self) -> None:
        self.states: list[_ScopeState] = []


_scopes = _Scopes()


@contextlib.contextmanager
def kept_scope_state() -> Iterator[None]:
    """A context in which `restore_scope_state` restores Keras's state of its beginning.

    Entered by the scope of a strategy, after it has set that state.
    """
    from keras.src.backend.common import global_state

    tracker = global_state.GLOBAL_STATE_TRACKER
    found = {name: getattr(tracker, name, None) for name in _OF_SCOPES}
    states = _scopes.states
    depth = len(states)
    states.append(_ScopeState(tracker, found))
    try:
        yield
    finally:
        del states[depth:]


def restore_scope_state() -> None:
    """Restores the state of this thread's scope after `keras.utils.clear_session`.

    `clear_session` replaces `GLOBAL_STATE_TRACKER`, and may be called under any name
    that it was imported by: the scope finds another tracker.
    """
    if not _scopes.states:
        return
    from keras.src.backend.common import global_state

    state, tracker = _scopes.states[-1], global_state.GLOBAL_STATE_TRACKER
    if state.tracker is not tracker:
        state.tracker = tracker
        for name, value in state.values.items():
            if value is not None:
                setattr(tracker, name, value)


def values_scope(mapping: Iterable[tuple[Any, Any]]) -> Any:
    """A `StatelessScope` in which variables have values of any shape.

    Keras 3.15: `StatelessScope.state_mapping`, from the `id` of a variable.
    """
    import keras

    scope = keras.StatelessScope()
    for variable, value in mapping:
        scope.state_mapping[id(variable)] = value
    return scope
