"""Warning for plain `tf.Variable`s that are created in a scope."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from keras_strategies.user_warnings import warn_user

# A variable of `tf.train.Checkpoint`, which replicas do not assign.
_SAVE_COUNTER = "save_counter"


class _Making(threading.local):
    # Whether Keras creates the current variable.
    by_keras = False


_making = _Making()


@contextlib.contextmanager
def made_by_keras() -> Iterator[None]:
    """Context in which the `tf.Variable` of a `keras.Variable` is created."""
    previous = _making.by_keras
    _making.by_keras = True
    try:
        yield
    finally:
        _making.by_keras = previous


def warning_of_plain_variables(replicas: int) -> Any:
    """A context in which `tf.Variable(...)` warns that it is not mirrored.

    Args:
        replicas: int, the number of replicas.
    """

    def create(next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        if not _making.by_keras and kwargs.get("name") != _SAVE_COUNTER:
            warn_user(
                f"A `tf.Variable` was made in the scope of a strategy with {replicas} "
                "replicas. It is not mirrored: all replicas assign one variable on one "
                "device, so `assign_add(1)` in `run` adds 1 for each of them. Use "
                "`keras.Variable(..., aggregation=...)`, which has a copy on each "
                "replica and aggregates the assigned values."
            )
        return next_creator(**kwargs)

    return tf.variable_creator_scope(create)
