"""Reads of variables by a replica, on its device, and their gradients."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from keras_strategies.engines.tensorflow.compat.gradients import (
    record_operation,
    without_recording,
)


class _Reading(threading.local):
    # The device of the replica that this thread runs, None outside of replicas; and the
    # graph that the replica builds, None in eager code.
    device: str | None = None
    graph: Any = None


_reading = _Reading()


@contextlib.contextmanager
def reading_on(device: str) -> Iterator[None]:
    """Makes this thread read variables on a device: from their copies there, if any.

    Args:
        device: as TensorFlow names it, `/device:KIND:INDEX`.
    """
    previous = _reading.device, _reading.graph
    _reading.device, _reading.graph = device, current_graph()
    try:
        yield
    finally:
        _reading.device, _reading.graph = previous


def replica_device() -> str | None:
    """The device that this thread reads on; None outside of replicas."""
    if _reading.graph is None and not tf.executing_eagerly():
        # A program traced by one replica may be called by all of them.
        return None
    return _reading.device


def is_in_replica_graph() -> bool:
    """Whether no loop, branch or program was entered since `reading_on`."""
    return current_graph() is _reading.graph


@contextlib.contextmanager
def unrecorded_on(device: str) -> Iterator[None]:
    """Context of operations on a device, in the replica's graph, without recording.

    A read in a loop or a branch is hoisted out of it: gradients inside a loop follow
    operations, and would end at the handle of the copy.
    """
    graph = _reading.graph
    with (
        contextlib.nullcontext() if graph is None else graph.as_default(),
        without_recording(),
        tf.device(device),
    ):
        yield


def record_as_read_of(
    variable: Any, value: Any, gradient_of: Callable[[Any], Any]
) -> None:
    """Records a value on tapes as a read of a variable."""
    record_operation(
        "ReadVariableOp",
        [value],
        [variable.handle],
        lambda gradient: [gradient_of(gradient)],
    )


def current_graph() -> Any:
    """The graph that is being built; None in eager code."""
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
