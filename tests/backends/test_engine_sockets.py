"""Waits in connections of engines end, and no others."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from keras_strategies.engines import engine_sockets
from keras_strategies.engines.engine_sockets import EngineSockets

pytestmark = [
    pytest.mark.one_backend("jax"),
    pytest.mark.skipif(
        not os.path.isdir("/proc/self/fd"), reason="sockets are found in /proc"
    ),
]

SECONDS = 60.0


class Alone:
    """Stands in for a group of one worker."""

    def __init__(self, others: Any = ()):
        self.others = list(others)

    def check(self) -> None:
        pass

    def gather_values(self, what: str, value: Any) -> list[Any]:
        return [value, *self.others]


def listener() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0))


def connected(server: socket.socket) -> tuple[socket.socket, socket.socket]:
    own = socket.create_connection(server.getsockname(), timeout=SECONDS)
    return own, server.accept()[0]


@contextmanager
def closing(*sockets: socket.socket) -> Iterator[None]:
    with ExitStack() as stack:
        for each in sockets:
            stack.enter_context(each)
        yield


def assert_works(pair: tuple[socket.socket, socket.socket]) -> None:
    pair[0].sendall(b"x")
    assert pair[1].recv(1) == b"x"


def test_connections_of_the_engines_listener_end() -> None:
    other = listener()
    sockets = EngineSockets()
    made = sockets.listening(listener)
    with sockets.connecting(Alone()):  # type: ignore[arg-type]
        later = listener()
    ended, pairs = connected(made), [connected(other), connected(later)]
    with closing(*ended, *pairs[0], *pairs[1], made, other, later):
        assert sockets.shutdown() == 2
        assert ended[0].recv(1) == ended[1].recv(1) == b""
        for pair in pairs:
            assert_works(pair)


def test_the_connection_of_workers_ends() -> None:
    """A peer that has accepted a connection never answers."""
    silent, server = listener(), listener()
    sockets = EngineSockets()
    pairs: list[tuple[socket.socket, socket.socket]] = []
    group = Alone([[list(silent.getsockname())]])

    class Lost(Exception):
        pass

    def create() -> None:
        with sockets.connecting(group):  # type: ignore[arg-type]
            pairs.append(connected(server))
            accepting = listener()
            pairs.append(connected(accepting))
            threading.Timer(0.2, sockets.shutdown).start()
            for _ in range(2):
                # The second one is made after the loss.
                place = silent.getsockname()
                with socket.create_connection(place, timeout=SECONDS) as own:
                    assert own.recv(1) == b""
                pairs.append(connected(server))
            accepting.close()
            raise Lost

    with closing(silent, server):
        with pytest.raises(Lost):
            create()
        for pair in pairs:
            with closing(*pair):
                assert_works(pair)


def test_a_connection_that_no_one_answers_ends() -> None:
    """As to a host that does not exist any more."""
    full = socket.socket()
    full.bind(("127.0.0.1", 0))
    full.listen(0)
    waiting: list[socket.socket] = []
    with ExitStack() as stack:
        stack.enter_context(full)
        while True:
            own = stack.enter_context(socket.socket())
            own.settimeout(0.2)
            try:
                own.connect(full.getsockname())
            except TimeoutError:
                waiting.append(own)
                break
        assert engine_sockets._unanswered()
        sockets = EngineSockets()
        group = Alone([[list(full.getsockname())]])
        with sockets.connecting(group):  # type: ignore[arg-type]
            assert sockets.shutdown() >= 1
        waiting[0].settimeout(SECONDS)
        with pytest.raises(OSError) as raised:
            waiting[0].recv(1)
        assert raised.value.errno in (errno.ENOTCONN, errno.ECONNRESET)


# gRPC connects to IPv4 addresses by sockets of IPv6.
@pytest.mark.parametrize("host", ["127.0.0.1", "::ffff:127.0.0.1"])
def test_added_addresses_end(host: str) -> None:
    server = listener()
    port = server.getsockname()[1]
    own = socket.create_connection((host, port), timeout=SECONDS)
    store = own, server.accept()[0]
    sockets = EngineSockets()
    sockets.add("localhost", port)
    with closing(*store, server):
        assert sockets.shutdown() == 2
        assert store[0].recv(1) == b""
