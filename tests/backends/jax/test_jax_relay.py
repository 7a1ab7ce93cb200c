"""The relay before JAX's service: it passes on, stays silent, and is cut."""

from __future__ import annotations

import socket
import time

import keras
import pytest

pytestmark = pytest.mark.skipif(keras.backend.backend() != "jax", reason="JAX only")

WAIT = 0.3


@pytest.fixture
def line():
    """Makes `(near, far, relay)`: both ends of a line through a relay."""
    opened = []

    def make(keeps: bool):
        from keras_strategies.engines.jax.workers.coordination_relay import Relay

        server = socket.create_server(("127.0.0.1", 0))
        relay = Relay(
            "127.0.0.1",
            lambda: socket.create_connection(server.getsockname(), WAIT),
            keeps,
        )
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


def test_the_chiefs_passes_on_that_an_end_is_gone(line):
    near, far, _ = line(False)
    far.close()
    assert near.recv(1) == b""


def test_it_can_be_cut(line):
    near, far, relay = line(False)
    relay.close()
    assert near.recv(1) == b""
    assert far.recv(1) == b""
