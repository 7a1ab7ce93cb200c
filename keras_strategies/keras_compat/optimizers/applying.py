"""Calls of `optimizer.apply` of a thread, which a function may replace."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from keras_strategies.keras_compat import patching


def add_slot(
    original: Any,
    self: Any,
    reference_variable: Any,
    name: Any = None,
    initializer: Any = "zeros",
) -> Any:
    previous = _slot.reference
    _slot.reference = reference_variable
    try:
        return original(self, reference_variable, name=name, initializer=initializer)
    finally:
        _slot.reference = previous


class _Slot(threading.local):
    # The variable that an optimizer variable is being made for.
    reference: Any = None


_slot = _Slot()


def slot_reference() -> Any:
    """The variable that an optimizer's own is being made for now, or None."""
    return _slot.reference


class _Applying(threading.local):
    # Takes the gradients of this thread's `optimizer.apply`.
    sink: Callable[..., Any] | None = None


applying = _Applying()


@contextlib.contextmanager
def applying_through(sink: Callable[..., Any]) -> Iterator[None]:
    """Calls `sink(optimizer, gradients, variables)` instead of `optimizer.apply`."""
    patching.install("parameter servers")
    previous = applying.sink
    applying.sink = sink
    try:
        with patching.installed_while("custom loops"):
            yield
    finally:
        applying.sink = previous


def shared_apply(
    original: Any, self: Any, grads: Any, trainable_variables: Any = None
) -> Any:
    # Without a sink, the `apply` of its inner optimizers is replaced.
    call = original if applying.sink is None else applying.sink
    return call(self, grads, trainable_variables)


def stateless_apply(
    original: Any,
    self: Any,
    optimizer_variables: Any,
    grads: Any,
    trainable_variables: Any,
) -> Any:
    from keras.src.optimizers.base_optimizer import BaseOptimizer

    own = original if applying.sink is None else BaseOptimizer.stateless_apply
    return own(self, optimizer_variables, grads, trainable_variables)
