"""Strategies that are made and never used, while a model trains without them."""

from __future__ import annotations

import atexit
import gc
import warnings
from typing import Any

import keras

from keras_strategies.keras_compat.strategy_attribute import strategy_of
from keras_strategies.runtime.once import once
from keras_strategies.user_warnings import user_line

# The line that made each strategy, and its class, by its id.
_unused: dict[int, tuple[str, str]] = {}


def made(strategy: Any) -> None:
    """Begins to watch a strategy that has been made."""
    _check_at_exit()
    _unused[id(strategy)] = user_line(), type(strategy).__name__


def used(strategy: Any) -> None:
    """Ends to watch a strategy: a scope, a run or a dataset of it begins."""
    _unused.pop(id(strategy), None)


@once
def _check_at_exit() -> None:
    atexit.register(_ended)


def _ended() -> None:
    """Warns at exit of a strategy, if a model has been trained without one."""
    if not _unused:
        return
    (line, kind), *_ = _unused.values()
    for found in gc.get_objects():
        # Not `isinstance`, which reads `__class__` of every object.
        is_model = issubclass(type(found), keras.Model) and strategy_of(found) is None
        if is_model and "history" in vars(found):  # `fit` sets it.
            path, _, number = line.rpartition(":")
            message = (
                f"The {kind} was never used, and `fit` trained model {found.name!r} "
                "without it, as plain Keras. Create and compile the model in `with "
                "strategy.scope():`."
            )
            warnings.warn_explicit(message, UserWarning, path, int(number))
            return
