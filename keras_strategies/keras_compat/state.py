"""What Keras keeps for each thread, and variables that wait for their values."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any


def current_stateless_scope() -> Any:
    """The innermost `keras.StatelessScope` of this thread, or None."""
    from keras.src.backend.common.stateless_scope import get_stateless_scope

    return get_stateless_scope()


@contextlib.contextmanager
def outside_stateless_scopes() -> Iterator[None]:
    """Reads and assigns variables themselves, whatever scope is open.

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
    """Gives this thread another thread's Keras state."""
    from keras.src.backend.common import global_state

    own = vars(global_state.GLOBAL_STATE_TRACKER)
    saved = dict(own)
    own.clear()
    own.update(state)
    # The call context belongs to the thread whose layers are being called.
    own.pop("current_call_ctx", None)
    try:
        yield
    finally:
        own.clear()
        own.update(saved)


def has_deferred_variables() -> bool:
    """Whether variables were made in a stateless scope and wait for their values.

    Keras 3.15: the global attribute "uninitialized_variables". The list is made if
    there is none, so that threads that take over this one's state share it.
    """
    from keras.src.backend.common import global_state

    return bool(
        global_state.get_global_attribute(
            "uninitialized_variables", [], set_to_default=True
        )
    )


def build_optimizer_without_values(optimizer: Any, variables: list[Any]) -> None:
    """`optimizer.build` for variables that have no values.

    Keras 3.15 on TensorFlow: `TFOptimizer._var_key` asks for the `tf.Variable`.
    """
    object.__setattr__(optimizer, "_var_key", id)
    try:
        optimizer.build(variables)
    finally:
        object.__delattr__(optimizer, "_var_key")


@contextlib.contextmanager
def forgetting_deferred_variables() -> Iterator[None]:
    """Variables that are made inside, in a stateless scope, never get values.

    Keras 3.15: the global attribute "uninitialized_variables".
    """
    from keras.src.backend.common import global_state

    before = list(global_state.get_global_attribute("uninitialized_variables", []))
    try:
        yield
    finally:
        global_state.set_global_attribute("uninitialized_variables", before)


def deferred_variables() -> list[Any]:
    """The variables that were made in a stateless scope and wait for their values.

    Keras 3.15: the global attribute "uninitialized_variables".
    """
    from keras.src.backend.common import global_state

    return list(global_state.get_global_attribute("uninitialized_variables", []))


def initialize_deferred_variables(scope_of: Callable[[Any], Any]) -> bool:
    """Gives variables that were made in a stateless scope their values.

    Keras 3.15: as `initialize_all_variables`, by `KerasVariable._deferred_initialize`.

    Args:
        scope_of: gives the context manager to do it in, or None.

    Returns:
        Whether there were any.
    """
    from keras.src.backend.common import global_state

    waiting = global_state.get_global_attribute("uninitialized_variables", [])
    global_state.set_global_attribute("uninitialized_variables", [])
    for variable in waiting:
        with scope_of(variable) or contextlib.nullcontext():
            variable._deferred_initialize()
    return bool(waiting)
