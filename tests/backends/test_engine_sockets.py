"""Waits in connections of engines end, and no others."""

from __future__ import annotations

import os
import socket
import threading
from typing import Any

import pytest

from keras_strategies.runtime.engine_sockets import EngineSockets

pytestmark = pytest.mark.skipif(
    not os.path.isdir("/proc/self/fd"), reason="sockets are found in /proc"
)


class Alone:
    """Stands in for a group of one worker."""

    def check(self) -> None:
        pass

    def gather_values(self, what: str, value: Any) -> list[Any]:
        return [value]


def connected(listener: socket.socket) -> tuple[socket.socket, socket.socket]:
    own = socket.create_connection(listener.getsockname(), timeout=60)
    return own, listener.accept()[0]


def test_connections_of_new_listeners_end() -> None:
    other = socket.create_server(("127.0.0.1", 0))
    sockets = EngineSockets()
    with sockets.making(Alone()):  # type: ignore[arg-type]
        made = socket.create_server(("127.0.0.1", 0))
    ended, left = connected(made), connected(other)
    try:
        assert sockets.shutdown() == 2
        assert ended[0].recv(1) == ended[1].recv(1) == b""
        left[0].sendall(b"x")
        assert left[1].recv(1) == b"x"
    finally:
        for each in (*ended, *left, made, other):
            each.close()


def test_a_listener_may_be_older_than_its_group() -> None:
    sockets = EngineSockets()
    sockets.expect()
    listener = socket.create_server(("127.0.0.1", 0))
    with sockets.making(Alone()):  # type: ignore[arg-type]
        pass
    ended = connected(listener)
    try:
        assert sockets.shutdown() == 2
        assert ended[0].recv(1) == b""
    finally:
        for each in (*ended, listener):
            each.close()


def test_without_connections_nothing_ends() -> None:
    assert EngineSockets().shutdown() == 0


def test_the_creation_of_a_group_ends() -> None:
    """A peer that has accepted a connection never answers, and none accepts another."""
    listener = socket.create_server(("127.0.0.1", 0))
    silent = socket.create_server(("127.0.0.1", 0))
    earlier = connected(listener)
    sockets = EngineSockets()

    class Lost(Exception):
        pass

    def create() -> None:
        with sockets.making(Alone()):  # type: ignore[arg-type]
            threading.Timer(0.2, sockets.shutdown).start()
            with socket.create_connection(silent.getsockname(), timeout=60) as own:
                assert own.recv(1) == b""
            raise Lost

    try:
        with pytest.raises(Lost):
            create()
        earlier[0].sendall(b"x")
        assert earlier[1].recv(1) == b"x"
    finally:
        for each in (*earlier, listener, silent):
            each.close()


# gRPC connects to IPv4 addresses by sockets of IPv6.
@pytest.mark.parametrize("host", ["127.0.0.1", "::ffff:127.0.0.1"])
def test_added_addresses_end(host: str) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    store = socket.create_connection((host, port), timeout=60), listener.accept()[0]
    sockets = EngineSockets()
    sockets.add("localhost", port)
    try:
        assert sockets.shutdown() == 2
        assert store[0].recv(1) == b""
    finally:
        for each in (*store, listener):
            each.close()
