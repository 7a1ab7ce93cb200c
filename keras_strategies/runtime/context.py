"""The current strategy, and cross-replica or replica context of code."""

from __future__ import annotations

import atexit
import contextlib
import threading
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from keras_strategies.errors import (
    ContextError,
    MixedStrategyError,
)
from keras_strategies.keras_compat.thread_state import kept_scope_state
from keras_strategies.runtime.frames import Frame, Pushed, contexts
from keras_strategies.runtime.replica_context import ReplicaContext

if TYPE_CHECKING:
    from keras_strategies.runtime.engine import StrategyCore


# Open scopes, with their threads: frameworks close a scope in its own thread only.
_open: weakref.WeakKeyDictionary[contextlib.ExitStack, threading.Thread] = (
    weakref.WeakKeyDictionary()
)


def _close_open_scopes() -> None:
    """Closes scopes that are open at exit, the innermost first.

    Those of `set_strategy`, and of `scope().__enter__()`, would be closed by Python's
    garbage collector when modules are empty.
    """
    for stack, thread in reversed(list(_open.items())):
        if thread is threading.current_thread():
            stack.close()


atexit.register(_close_open_scopes)


def _frame() -> Frame | None:
    return contexts.frames[-1] if contexts.frames else None


def current_strategy() -> StrategyCore | None:
    """The strategy of the innermost open scope or `run`; None outside.

    `ks.get_strategy`, in a higher layer, returns the default strategy there.
    """
    frame = _frame()
    return frame.strategy if frame is not None else None


def has_strategy() -> bool:
    """Whether a strategy other than the default one is current."""
    return _frame() is not None


def in_cross_replica_context() -> bool:
    """Whether code runs once for all replicas: in a scope, outside `run`."""
    frame = _frame()
    if frame is None or frame.replica is not None:
        return False
    return frame.strategy.replica_context_in_scope is None


def current_replica() -> ReplicaContext | None:
    """The replica context of this thread; None in cross-replica context."""
    frame = _frame()
    return frame.replica if frame is not None else None


@contextlib.contextmanager
def cross_replica(strategy: StrategyCore) -> Iterator[StrategyCore]:
    """Makes a strategy current, in cross-replica context."""
    frame = _frame()
    if frame is not None and frame.strategy is not strategy:
        raise MixedStrategyError(
            f"Mixing different strategies: the scope of {strategy!r} was opened "
            f"inside that of {frame.strategy!r}. Leave the first scope, or use the "
            "same strategy object."
        )
    if frame is not None and frame.replica is not None:
        raise ContextError(
            f"The scope of {strategy!r} was opened inside `run`, where code runs on "
            "each replica. Open it outside, or use `merge_call`."
        )
    with Pushed(Frame(strategy, None)):
        yield strategy


@contextlib.contextmanager
def entered(strategy: StrategyCore) -> Iterator[StrategyCore]:
    """`strategy.scope()` without the check of models created outside of it."""
    with cross_replica(strategy), strategy.drivers.fit.scope(), kept_scope_state():
        yield strategy


@contextlib.contextmanager
def opened(
    strategy: StrategyCore, *contexts: contextlib.AbstractContextManager[Any]
) -> Iterator[None]:
    """`strategy.scope()`: `entered`, with other contexts, until the process ends."""
    with contextlib.ExitStack() as stack:
        _open[stack] = threading.current_thread()
        stack.enter_context(entered(strategy))
        for each in contexts:
            stack.enter_context(each)
        yield


def on_replica(
    replica: ReplicaContext,
) -> contextlib.AbstractContextManager[None]:
    """A context in which this thread is in a replica's context."""
    return Pushed(Frame(replica.strategy, replica))


def set_strategy(strategy: StrategyCore | None) -> None:
    """Makes a strategy current until the next call, as an open scope would.

    Args:
        strategy: a strategy, or None for the default one.

    Raises:
        RuntimeError: inside a scope.
    """
    frame_of_call = getattr(contexts, "set_by_call", None)
    if contexts.frames and contexts.frames[-1] is not frame_of_call:
        raise ContextError(
            "`experimental_set_strategy` was called inside the scope of "
            f"{contexts.frames[-1].strategy!r}. Call it outside every scope."
        )
    contexts.frames.clear()
    opened = getattr(contexts, "opened_by_call", None)
    if opened is not None:
        opened.close()
        contexts.opened_by_call = None  # type: ignore[attr-defined]
    contexts.set_by_call = None  # type: ignore[attr-defined]
    if strategy is not None:
        opened = contextlib.ExitStack()
        opened.enter_context(strategy.scope())
        contexts.opened_by_call = opened  # type: ignore[attr-defined]
        contexts.set_by_call = contexts.frames[-1]  # type: ignore[attr-defined]
