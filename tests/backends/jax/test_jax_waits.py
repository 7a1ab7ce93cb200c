"""Waits of workers on JAX that the loss of another worker ends."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from keras_strategies.errors import WorkerError

pytest.importorskip("jax")


class Group:
    """A group in which a worker is lost after some seconds."""

    def __init__(self, seconds: float):
        self._lost_at = time.monotonic() + seconds

    @property
    def has_ended(self) -> bool:
        return time.monotonic() >= self._lost_at

    def check(self) -> None:
        if self.has_ended:
            raise WorkerError("worker 1 was lost")


def waited(call: Any, grace: float) -> tuple[float, BaseException]:
    """Seconds that a wait of a lost worker took, and its error."""
    from keras_strategies.engines.jax.workers.service_waits import until_loss

    group: Any = Group(0.3)
    begin = time.monotonic()
    with pytest.raises((WorkerError, ValueError)) as raised:
        until_loss(group, call, grace)
    return time.monotonic() - begin, raised.value


def test_a_wait_that_the_engine_does_not_end_is_left() -> None:
    never = threading.Event()
    try:
        seconds, error = waited(never.wait, grace=1.0)
    finally:
        never.set()
    assert isinstance(error, WorkerError) and "worker 1" in str(error)
    assert 1.3 <= seconds < 10


def test_a_wait_that_the_engine_ends_has_its_error() -> None:
    def fail() -> None:
        time.sleep(0.8)
        raise ValueError("UNKNOWN: Gloo all-reduce failed")

    seconds, error = waited(fail, grace=60.0)
    assert isinstance(error, ValueError) and seconds < 10
