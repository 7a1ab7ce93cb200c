"""Traces of a layer's code that leave no state: of its objects, and random numbers.

The generators of Python and NumPy belong to the process. Other threads may draw from
them during a trace, such as those of a dataset that reads ahead from a generator. Their
numbers must not be drawn again, so the state is restored only after draws of the trace.
"""

from __future__ import annotations

import contextlib
import random
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any, Generic, TypeVar

import numpy as np

from keras_strategies.runtime.row_proofs.python_state import PythonState, StateChange

T = TypeVar("T")

_REENTRANT = type(threading.RLock())
#: Methods of `random.Random` in C, by which all others draw.
_DRAWS_OF_PYTHON = frozenset({"random", "getrandbits", "seed", "setstate"})


@dataclass(frozen=True)
class TraceApart(Generic[T]):
    """A trace of a layer's code.

    Args:
        result: what the trace has returned.
        changes: list of `StateChange`, which have been restored.
        draws_numbers: bool, whether it draws from the generators of Python or NumPy.
    """

    result: T
    changes: list[StateChange]
    draws_numbers: bool


def traced_apart(state: PythonState, trace: Callable[[], T]) -> TraceApart[T]:
    """Traces code of a layer, and restores what the trace has changed.

    If the generators of Python or NumPy have advanced, it is traced once more to find
    out whether this code has drawn, or another thread.

    Args:
        state: the Python state that its code can reach, before the trace.
        trace: callable without arguments, which calls the layer.
    """
    numbers = NumbersOfProcess()
    try:
        result = trace()
    finally:
        changes = state.changes()
    if numbers.are_unchanged():
        return TraceApart(result, changes, False)
    with _noting_draws() as are_drawn:
        try:
            result = trace()
        finally:
            changes = state.changes() or changes
    if are_drawn():
        numbers.restore()
    return TraceApart(result, changes, are_drawn())


class NumbersOfProcess:
    """The states of the generators of Python and NumPy now."""

    def __init__(self) -> None:
        self._python, self._numpy = random.getstate(), np.random.get_state()

    def are_unchanged(self) -> bool:
        return self._python == random.getstate() and _are_equal(
            self._numpy, np.random.get_state()
        )

    def restore(self) -> None:
        random.setstate(self._python)
        np.random.set_state(self._numpy)


def _are_equal(first: Any, second: Any) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


@contextlib.contextmanager
def _noting_draws() -> Iterator[Callable[[], bool]]:
    """Notes whether this thread draws from the generators of Python or NumPy.

    Yields:
        A function without arguments, for after the context.
    """
    with _calls_of_python_noted() as python, _numpy_noted() as numpy:
        yield lambda: python() or numpy()


@contextlib.contextmanager
def _calls_of_python_noted() -> Iterator[Callable[[], bool]]:
    if sys.getprofile() is not None:
        # A profiler of the user, which stays: the draws may be those of this thread.
        yield lambda: True
        return
    generator = random.random.__self__  # type: ignore[attr-defined]
    calls = list[str]()

    def note(frame: FrameType, event: str, function: Any) -> None:
        if event == "c_call" and getattr(function, "__self__", None) is generator:
            calls.append(function.__name__)

    sys.setprofile(note)
    try:
        yield lambda: not _DRAWS_OF_PYTHON.isdisjoint(calls)
    finally:
        sys.setprofile(None)


@contextlib.contextmanager
def _numpy_noted() -> Iterator[Callable[[], bool]]:
    """Draws of other threads from NumPy's generator wait, and are not noted.

    Where the lock is not reentrant (NumPy 2.0), this thread would wait for its own
    draws, too: there each draw counts as one of this thread.
    """
    lock = np.random.get_bit_generator().lock  # type: ignore[attr-defined]
    with lock if isinstance(lock, _REENTRANT) else contextlib.nullcontext():
        before = np.random.get_state()
        is_drawn = False
        try:
            yield lambda: is_drawn
        finally:
            is_drawn = not _are_equal(before, np.random.get_state())
