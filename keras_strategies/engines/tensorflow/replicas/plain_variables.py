"""A warning for variables of TensorFlow that are made in a scope."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from keras_strategies.user_warnings import warn_user

# Made by `tf.train.Checkpoint`, and by nothing that replicas run.
_SAVE_COUNTER = "save_counter"


class _Making(threading.local):
    # Whether Keras makes the variables that are being made.
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
    """A context in which `tf.Variable(...)` warns that it is one for all replicas.

    Args:
        replicas: int, how many replicas would assign it.
    """

    def create(next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        if not _making.by_keras and kwargs.get("name") != _SAVE_COUNTER:
            warn_user(
                f"A `tf.Variable` was made in the scope of a strategy with {replicas} "
                "replicas. It stays one variable on one device, which all replicas "
                "assign: `assign_add(1)` in `run` adds 1 on each of them. Use "
                "`keras.Variable(..., aggregation=...)`, which has a copy on each "
                "replica and aggregates what they assign."
            )
        return next_creator(**kwargs)

    return tf.variable_creator_scope(create)
