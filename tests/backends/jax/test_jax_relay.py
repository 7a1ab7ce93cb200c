"""JAX's coordination service: the relay before it, and waits that end with a loss."""

from __future__ import annotations

import socket
import threading
import time

import keras
import pytest

from keras_strategies.errors import WorkerError

if keras.backend.backend() != "jax":
    pytest.skip("tests of the JAX backend", allow_module_level=True)

from keras_strategies.engines.jax.workers.coordination_relay import Relay
from keras_strategies.engines.jax.workers.service_waits import until_loss

WAIT = 0.3


@pytest.fixture
def line():
    """Makes `(near, far, relay)`: both ends of a line through a relay."""
    opened = []

    def make(keeps: bool):
        server = socket.create_server(("127.0.0.1", 0))
        connect = lambda: socket.create_connection(server.getsockname(), WAIT)  # noqa: E731
        relay = Relay("127.0.0.1", connect, keeps)
        near = socket.create_connection(("127.0.0.1", relay.port), 10)
        far, _ = server.accept()
        far.settimeout(10)
        opened.extend([near, far, server, relay])
        return near, far, relay

    yield make
    for each in opened:
        each.close()


def test_it_passes_on_in_both_directions_after_a_long_silence(line):
    near, far, _ = line(True)
    # Longer than the time in which it has to connect.
    time.sleep(3 * WAIT)
    near.sendall(b"question")
    assert far.recv(100) == b"question"
    far.sendall(b"answer")
    assert near.recv(100) == b"answer"


def test_a_client_does_not_see_the_far_end_go(line):
    near, far, _ = line(True)
    far.close()
    near.settimeout(WAIT)
    with pytest.raises(TimeoutError):
        near.recv(1)
    near.sendall(b"nobody hears it")


def test_the_chiefs_passes_on_that_an_end_is_gone_and_can_be_cut(line):
    near, far, _ = line(False)
    far.close()
    assert near.recv(1) == b""
    near, far, relay = line(False)
    relay.close()
    assert near.recv(1) == b""
    assert far.recv(1) == b""


class Group:
    """The part of a `WorkerGroup` that is used."""

    is_lost = False

    def check(self) -> None:
        if self.is_lost:
            raise WorkerError("Worker 0 was lost.")


def test_a_call_that_waits_is_left_when_a_worker_is_lost() -> None:
    assert until_loss(Group(), lambda: 7) == 7
    group, answered, waits = Group(), threading.Event(), threading.Event()

    def call() -> str:
        waits.set()
        answered.wait(60)
        return "late"

    def lose() -> None:
        waits.wait(60)
        group.is_lost = True

    thread = threading.Thread(target=lose)
    thread.start()
    with pytest.raises(WorkerError, match="Worker 0 was lost"):
        until_loss(group, call)
    thread.join()
    answered.set()
