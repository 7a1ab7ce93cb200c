"""Keras's state of a thread: scopes, devices and names."""

from __future__ import annotations

import contextlib
import functools
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
    global_state = _global_state()
    scope = global_state.get_global_attribute("stateless_scope")
    global_state.set_global_attribute("stateless_scope", None)
    try:
        yield
    finally:
        global_state.set_global_attribute("stateless_scope", scope)


def thread_state() -> dict[str, Any]:
    """A copy of Keras's state of this thread: scopes of names, device, and so on."""
    return dict(_own_state())


def current_torch_device() -> str | None:
    """The device of the innermost `keras.device` in this thread, such as "cuda:0".

    Keras 3.15: the global attribute "torch_device".
    """
    device: str | None = _own_state().get("torch_device")
    return device


def _own_state() -> dict[str, Any]:
    """Keras's state of this thread.

    Keras 3.15: `keras.src.backend.common.global_state.GLOBAL_STATE_TRACKER`, a
    `threading.local` that `clear_session` replaces.
    """
    return vars(_global_state().GLOBAL_STATE_TRACKER)


@functools.cache
def _global_state() -> Any:
    from keras.src.backend.common import global_state

    return global_state


class with_thread_state:
    """A context with another thread's Keras state in this thread.

    Args:
        state: what `thread_state` has returned there.
    """

    def __init__(self, state: dict[str, Any]):
        self._state = state

    def __enter__(self) -> None:
        self._own = own = _own_state()
        self._saved = dict(own)
        own.clear()
        own.update(self._state)
        # Threads at the same time open scopes of their own.
        for name in _STACKS:
            own[name] = list(self._state.get(name) or ())
        # The call context is that of the thread that calls layers.
        own.pop("current_call_ctx", None)

    def __exit__(self, *exception: Any) -> None:
        self._own.clear()
        self._own.update(self._saved)


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
    tracker = _global_state().GLOBAL_STATE_TRACKER
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
    state, tracker = _scopes.states[-1], _global_state().GLOBAL_STATE_TRACKER
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
