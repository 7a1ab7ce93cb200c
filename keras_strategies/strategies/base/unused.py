"""Strategies that are made and never used, while a model trains without them.

No code of Keras is replaced for it. While such a strategy exists, Python's garbage
collector, which runs often during `fit`, calls a function that looks for `fit` among
the callers: training of some length is found early. The rest is found at exit.
"""

from __future__ import annotations

import atexit
import gc
import inspect
import time
import warnings
import weakref
from typing import Any

import keras

from keras_strategies.keras_compat.strategy_attribute import strategy_of
from keras_strategies.runtime.once import once
from keras_strategies.user_warnings import user_line, warn_user

#: Seconds of `fit`: programs that compare a strategy with one device, and that have not
#: used it yet, are shorter.
PATIENCE = 30.0
# The line that made each strategy, and its class, by its id.
_unused: dict[int, tuple[str, str]] = {}


class _Fit:
    """The `fit` of a model without a strategy that is running."""

    model: Any = staticmethod(lambda: None)
    began = 0.0


def made(strategy: Any) -> None:
    """Begins to watch a strategy that has been made."""
    _check_at_exit()
    _unused[id(strategy)] = user_line(), type(strategy).__name__
    if _collected not in gc.callbacks:
        gc.callbacks.append(_collected)


def used(strategy: Any) -> None:
    """Ends to watch a strategy: a scope, a run or a dataset of it begins."""
    if _unused.pop(id(strategy), None) is not None and not _unused:
        _stop()


def _stop() -> None:
    _unused.clear()
    _Fit.model = staticmethod(lambda: None)
    if _collected in gc.callbacks:
        gc.callbacks.remove(_collected)


def _collected(phase: str, info: dict[str, int]) -> None:
    """Called by the garbage collector, in the thread that it interrupts."""
    if phase != "stop" or info["generation"] == 0:
        return
    model = _model_in_fit()
    if model is None:
        return
    if _Fit.model() is not model:
        _Fit.model, _Fit.began = weakref.ref(model), time.monotonic()
    elif time.monotonic() - _Fit.began > PATIENCE and _unused:
        (line, kind), *_ = _unused.values()
        _stop()
        warn_user(_text(model, kind, f"of {line} has not been used"))


def _model_in_fit() -> Any:
    """The model without a strategy whose `fit` is among the callers; or None."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "fit":
            model = frame.f_locals.get("self")
            if isinstance(model, keras.Model):
                return model if strategy_of(model) is None else None
        frame = frame.f_back
    return None


@once
def _check_at_exit() -> None:
    atexit.register(_ended)


def _ended() -> None:
    """Warns at exit of a strategy, if a model has been trained without one."""
    if not _unused:
        return
    (line, kind), *_ = _unused.values()
    _stop()
    for found in gc.get_objects():
        # Not `isinstance`, which reads `__class__` of every object.
        is_model = issubclass(type(found), keras.Model) and strategy_of(found) is None
        if is_model and "history" in vars(found):  # `fit` sets it.
            path, _, number = line.rpartition(":")
            message = _text(found, kind, "was never used")
            warnings.warn_explicit(message, UserWarning, path, int(number))
            return


def _text(model: Any, kind: str, how: str) -> str:
    return (
        f"The {kind} {how}, and `fit` trains model {model.name!r} without it, as plain "
        "Keras. Create and compile the model in `with strategy.scope():`."
    )
