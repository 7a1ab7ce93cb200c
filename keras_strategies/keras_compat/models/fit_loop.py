"""Position of `fit` in its epochs: the first one, and steps that are skipped."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import keras


def resumed_epoch(model: Any) -> int:
    """The epoch that `fit` resumes at; 0 if no backup has been restored.

    Keras 3.15: `BackupAndRestore` sets `_initial_epoch`.
    """
    return int(getattr(model, "_initial_epoch", 0) or 0)


def set_initial_epoch(model: Any, epoch: int) -> None:
    """Sets the epoch that `fit` resumes at."""
    model._initial_epoch = epoch


def skip_steps(
    model: Any,
    count: int,
    logs: dict[str, float],
    metrics: Any,
    at_end: Callable[[], None],
) -> None:
    """Makes the next calls of `model.train_function` read batches and do nothing else.

    Keras 3.15: `fit` calls it with a list of batches on Torch, an iterator on
    TensorFlow, and a state and an iterator on JAX, of which the metrics' variables are
    the fourth part.

    Args:
        model: a model in `fit`.
        count: int, number of calls.
        logs: dict, their return value.
        metrics: the values of the metrics' variables afterwards.
        at_end: called after the last one.
    """
    original = model.train_function
    per_call = int(model.steps_per_execution)
    left = count
    backend = keras.backend.backend()

    def passed() -> bool:
        nonlocal left
        left -= 1
        if left == 0:
            model.train_function = original
            at_end()
        return left == 0

    def restore() -> None:
        for variable, value in zip(model.metrics_variables, metrics, strict=True):
            variable.assign(value)

    def on_torch(data: Any) -> Any:
        if passed():
            restore()
        return logs

    def on_tensorflow(iterator: Any) -> Any:
        for _ in itertools.islice(iterator, per_call):
            pass
        if passed():
            restore()
        return logs

    def on_jax(state: Any, iterator: Any) -> Any:
        for _ in itertools.islice(iterator, per_call):
            pass
        if passed():
            values = [
                keras.ops.convert_to_tensor(value, variable.dtype)
                for variable, value in zip(
                    model.metrics_variables, metrics, strict=True
                )
            ]
            state = (*state[:3], values)
        return logs, state

    functions = {"torch": on_torch, "tensorflow": on_tensorflow, "jax": on_jax}
    model.train_function = functions[backend]
