"""Arrays that processes of one machine lend each other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

from keras_strategies.errors import ClusterTimeoutError
from keras_strategies.parameter_server.wire.arrays import shared_buffers
from keras_strategies.parameter_server.wire.arrays.shared_buffers import (
    SharedBufferReader,
    SharedBufferWriter,
)
from keras_strategies.parameter_server.wire.request_connection import Connection
from keras_strategies.parameter_server.wire.request_service import Service, serve

LARGE = shared_buffers.LEAST_BYTES // 4
SECONDS = 20.0

pytestmark = [
    pytest.mark.one_backend,
    pytest.mark.skipif(
        not shared_buffers.IS_AVAILABLE, reason="this system has no memfd_create"
    ),
]


def memory(value: float, size: int = LARGE) -> memoryview:
    return memoryview(np.full(size, value, "float32")).cast("B")


def first(reader: SharedBufferReader, reference) -> float:
    return float(np.frombuffer(reader.read(reference)[0], "float32")[0])


def test_what_a_slow_peer_may_still_read_stays() -> None:
    writer, reader = SharedBufferWriter(), SharedBufferReader()
    slow = writer.write([memory(1.0)], 1)
    read = np.frombuffer(reader.read(slow)[0], "float32")
    # None of these is answered, so nothing of the first is written over.
    for number in range(2, 6):
        writer.write([memory(number)], number)
    assert read[0] == 1.0
    writer.close()


@pytest.fixture
def address(tmp_path) -> str:
    return f"ipc://{tmp_path}/service"


def doubling(address: str, stop: threading.Event) -> threading.Thread:
    def run() -> None:
        service = Service(address)
        try:
            serve(service, lambda array, empty: array * 2, stop.is_set, every=0.05)
        finally:
            service.close()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_requests_and_replies_over_one_connection(address) -> None:
    stop = threading.Event()
    thread = doubling(address, stop)
    connection = Connection(address)
    try:
        for size in (10, LARGE, 30 * LARGE, LARGE + 1):
            for value in range(5):
                array = np.full(size, value, "float32")
                for shares_memory in (True, False):
                    number = connection.begin(array, shares_memory)
                    found = connection.finish(number, SECONDS)
                    assert np.array_equal(found, array * 2)
                    is_shared = shares_memory and size >= LARGE
                    assert connection.is_shared(found) == is_shared
        total = sum((10, LARGE, 30 * LARGE, LARGE + 1)) * 4 * 10
        assert connection.sent_bytes > total and connection.received_bytes > total
    finally:
        stop.set()
        thread.join()
        connection.close()


SERVICE = """
import sys
from keras_strategies.parameter_server.wire.request_service import Service, serve
serve(Service(sys.argv[1]), lambda array, empty: array * 2, lambda: False)
"""


@pytest.mark.multiprocess
def test_a_service_that_dies_and_comes_back_answers_what_was_lent(address) -> None:
    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", SERVICE, address])

    connection = Connection(address)
    array = np.arange(LARGE, dtype="float32")
    process = start()
    try:
        number = connection.begin(array, shares_memory=True)
        assert np.array_equal(connection.finish(number, SECONDS), array * 2)
        os.kill(process.pid, signal.SIGSTOP)
        number = connection.begin(array + 1, shares_memory=True)
        with pytest.raises(ClusterTimeoutError, match="did not answer within"):
            connection.finish(number, 0.2)
        number = connection.begin(array + 2, shares_memory=True)
        process.kill()
        process.wait()
        process = start()
        assert np.array_equal(connection.finish(number, SECONDS), (array + 2) * 2)
    finally:
        process.kill()
        process.wait()
        connection.close()
