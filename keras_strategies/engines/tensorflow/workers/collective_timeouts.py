"""Timeouts of collectives, by one thread for all of them.

TensorFlow has two threads for each collective with a timeout. They sleep until then,
also when the collective has long ended: 2,800 threads after 700 steps of `fit`. Here
collectives have no timeouts of their own. Each writes to variables when it begins and
when it has ended, also in a program that Python does not call, and a thread reads them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf

# Shorter than the time between the timeouts of two workers.
_TICK = 0.25


class CollectiveTimeouts:
    """Calls a function if a collective does not end in time.

    Args:
        seconds: returns how long a collective may take.
        end: ends the collectives under way.
    """

    def __init__(self, seconds: Callable[[], float], end: Callable[[], None]):
        self._seconds = seconds
        self._end = end
        self._thread: threading.Thread | None = None
        self._is_closed = threading.Event()
        # The numbers of the last collective that has begun and of the last that ended.
        self._begun: Any = None
        self._ended: Any = None

    def start(self) -> None:
        """Starts the thread, when TensorFlow's runtime is started."""
        if self._thread is not None:
            return
        with tf.init_scope(), tf.device("/device:CPU:0"):
            self._begun, self._ended = (
                tf.Variable(0, dtype=tf.int64, trainable=False, name=name)
                for name in ("collectives_begun", "collectives_ended")
            )
        self._thread = threading.Thread(
            target=self._watch, name="collective-timeouts", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Ends the thread."""
        self._is_closed.set()
        if self._thread is not None:
            self._thread.join()

    def forget(self) -> None:
        """Collectives of a program that has failed do not end."""
        if self._thread is not None:
            with tf.init_scope():
                self._ended.assign(self._begun)

    def within(self, tensor: Any, collective: Callable[[], Any]) -> Any:
        """The result of a collective, which has begun when its argument is computed.

        Args:
            tensor: the argument.
            collective: adds the operation.
        """
        begun = self._begun.handle
        with tf.device("/device:CPU:0"):
            one = tf.ones([], tf.int64)
            with tf.control_dependencies([tensor]):
                added = tf.raw_ops.AssignAddVariableOp(resource=begun, value=one)
            with tf.control_dependencies([added]):
                number = tf.raw_ops.ReadVariableOp(resource=begun, dtype=tf.int64)
        with tf.control_dependencies([number]):
            result = collective()
        with tf.device("/device:CPU:0"), tf.control_dependencies([result]):
            ended = tf.raw_ops.AssignVariableOp(
                resource=self._ended.handle, value=number
            )
        with tf.control_dependencies([ended]):
            return tf.identity(result)

    def _watch(self) -> None:
        last, since = 0, time.monotonic()
        while not self._is_closed.wait(_TICK):
            begun, ended = int(self._begun), int(self._ended)
            if begun == ended or ended != last:
                last, since = ended, time.monotonic()
            elif time.monotonic() - since > self._seconds():
                since = time.monotonic()
                self._end()
