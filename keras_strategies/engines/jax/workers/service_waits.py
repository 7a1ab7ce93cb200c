"""Waits in XLA that the loss of a worker ends.

While JAX's runtime starts, XLA waits for other workers in the chief's service: for all
of them to connect, for their devices, and for the addresses of Gloo. If the chief is
lost, the service does not answer, and its clients wait for minutes, without a way to
cancel.

Later, programs wait in Gloo. When its connections are shut down, it ends most waits,
but not that for a message of which a part was sent or received
(`gloo::transport::tcp::Pair::signalException`): these end after 30 minutes.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from keras_strategies.cluster.group import WorkerGroup
from keras_strategies.lead.connection import BEAT

T = TypeVar("T")


def until_loss(group: WorkerGroup, call: Callable[[], T], grace: float = 0.0) -> T:
    """The result of a call, unless a worker is lost meanwhile.

    The call runs on a thread. When a worker is lost, the thread is left to wait alone,
    with everything that the call refers to; its result is dropped.

    Args:
        group: the workers.
        call: callable without arguments; must set no state of the process.
        grace: float, seconds after the loss in which the call may still end by itself.

    Raises:
        WorkerError: if a worker is lost.
    """
    results: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            results.put((call(), None))
        except BaseException as error:
            results.put((None, error))

    threading.Thread(target=run, name="jax-wait", daemon=True).start()
    lost_at: float | None = None
    while True:
        try:
            result, error = results.get(timeout=BEAT)
        except queue.Empty:
            if lost_at is None and group.has_ended:
                lost_at = time.monotonic()
            if lost_at is not None and time.monotonic() - lost_at >= grace:
                group.check()
            continue
        if error is not None:
            raise error
        return result  # type: ignore[no-any-return]
