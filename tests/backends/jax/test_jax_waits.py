"""Waits of workers on JAX that the loss of another worker ends."""

from __future__ import annotations

import threading
import time
from typing import Any

import jax
import numpy as np
import pytest

from keras_strategies.engines.jax.workers.awaited_program import AwaitedProgram
from keras_strategies.engines.jax.workers.service_waits import until_loss
from keras_strategies.errors import WorkerError


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


class Workers:
    """A communicator of the group."""

    def __init__(self, seconds: float):
        self._group: Any = Group(seconds)

    def executed(self, program: Any, *args: Any) -> Any:
        wait = lambda: jax.block_until_ready(program(*args))  # noqa: E731
        return until_loss(self._group, wait, grace=1.0)


def awaited(function: Any, seconds: float) -> Any:
    workers: Any = Workers(seconds)
    return AwaitedProgram(workers, jax.jit(function))


def test_programs_are_traced_on_the_thread_of_the_caller_once() -> None:
    threads = []

    def function(state: Any, batch: Any) -> Any:
        threads.append(threading.get_ident())
        return [state[0] + batch["x"].sum()], batch["x"] * 2

    program = awaited(function, 60.0)
    state = [jax.numpy.zeros(())]
    for rows in (3, 3, 2, 3):
        state, doubled = program(state, {"x": np.ones((rows, 2), "float32")})
        np.testing.assert_array_equal(doubled, np.full((rows, 2), 2.0))
    assert float(state[0]) == 22.0
    assert set(threads) == {threading.get_ident()}
    # An uncommitted zero, and then what a program returned.
    assert len(threads) <= 3


def test_an_execution_that_does_not_end_is_left() -> None:
    never, began = threading.Event(), threading.Event()

    def wait(x: Any) -> Any:
        began.set()
        never.wait()
        return x

    def function(x: Any) -> Any:
        return jax.pure_callback(wait, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    begin = time.monotonic()
    try:
        with pytest.raises(WorkerError, match="worker 1"):
            awaited(function, 0.3)(jax.numpy.ones(3))
    finally:
        never.set()
    assert began.is_set() and time.monotonic() - begin < 20
