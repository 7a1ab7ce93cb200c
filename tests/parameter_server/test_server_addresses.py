"""Connections follow the address of a server that is restarted elsewhere."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from keras_strategies.parameter_server.wire.cluster_keys import Keys
from keras_strategies.parameter_server.wire.request_connection import Connection
from keras_strategies.parameter_server.wire.request_service import Service, serve
from keras_strategies.parameter_server.wire.server_addresses import ServerAddresses
from parameter_server import clusters

pytestmark = pytest.mark.one_backend("jax")

KEYS = Keys.new()


@contextmanager
def serving(address: str, reply: str) -> Iterator[str]:
    """A service at an address that answers every request; yields its address."""
    service = Service(address, KEYS)
    ended = threading.Event()
    thread = threading.Thread(
        target=serve, args=(service, lambda message, empty: reply, ended.is_set)
    )
    thread.start()
    try:
        yield service.address
    finally:
        ended.set()
        thread.join()
        service.close()


@pytest.fixture
def addresses() -> ServerAddresses:
    return ServerAddresses([""])


@pytest.fixture
def connection(addresses: ServerAddresses) -> Iterator[Connection]:
    made = Connection(lambda: addresses[0], KEYS)
    yield made
    made.close()


def test_a_request_is_sent_when_the_address_is_known(connection, addresses) -> None:
    number = connection.begin("where")
    with serving("tcp://127.0.0.1:0", "first") as found:
        addresses.set(0, found)
        assert connection.finish(number, clusters.SECONDS) == "first"


@pytest.mark.parametrize("kind", ["ipc", "tcp"])
def test_an_unanswered_request_is_repeated_at_the_next_address(
    connection, addresses, kind: str, tmp_path: Path
) -> None:
    def address(name: str) -> str:
        return f"ipc://{tmp_path}/{name}" if kind == "ipc" else "tcp://127.0.0.1:0"

    with serving(address("a"), "first") as first:
        addresses.set(0, first)
        assert connection.request("where", clusters.SECONDS) == "first"
    silent = Service(address("b"), KEYS)
    addresses.set(0, silent.address)
    number = connection.begin("where")
    assert silent.receive(clusters.SECONDS) is not None
    with serving(address("c"), "third") as third:
        addresses.set(0, third)
        assert connection.finish(number, clusters.SECONDS) == "third"
        assert connection.request("where", clusters.SECONDS) == "third"
    silent.close()
