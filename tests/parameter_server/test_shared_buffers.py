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
from keras_strategies.parameter_server.wire import shared_buffers
from keras_strategies.parameter_server.wire.shared_buffers import Borrower, Lender
from keras_strategies.parameter_server.wire.transport import Connection, Service, serve

LARGE = shared_buffers.LEAST_BYTES // 4
SECONDS = 20.0

pytestmark = pytest.mark.skipif(
    not shared_buffers.IS_AVAILABLE, reason="this system has no memfd_create"
)


def memory(value: float, size: int = LARGE) -> memoryview:
    return memoryview(np.full(size, value, "float32")).cast("B")


def first(borrower: Borrower, lent) -> float:
    return float(np.frombuffer(borrower.borrow(lent)[0], "float32")[0])


def test_arrays_arrive_and_begin_where_frameworks_like_it() -> None:
    lender, borrower = Lender(), Borrower()
    lent = lender.lend([memory(1.0, 3), memory(2.0), memory(3.0, 5)], 1)
    found = [np.frombuffer(m, "float32") for m in borrower.borrow(lent)]
    assert [each[0] for each in found] == [1.0, 2.0, 3.0]
    assert [len(each) for each in found] == [3, LARGE, 5]
    assert all(each.ctypes.data % 64 == 0 for each in found)
    assert all(borrower.has(each) for each in found)
    assert not borrower.has(np.array(found[0]))
    lender.close()


def test_regions_take_turns_once_the_peer_has_answered() -> None:
    lender, borrower = Lender(), Borrower()
    serials = []
    for number in range(6):
        lent = lender.lend([memory(number)], number)
        serials.append(lent.serial)
        assert first(borrower, lent) == number
        lender.answered(number)
    assert len(set(serials)) == 2
    lender.close()


def test_what_a_slow_peer_may_still_read_stays() -> None:
    lender, borrower = Lender(), Borrower()
    slow = lender.lend([memory(1.0)], 1)
    read = np.frombuffer(borrower.borrow(slow)[0], "float32")
    # None of these is answered, so nothing of the first is written over.
    for number in range(2, 6):
        lender.lend([memory(number)], number)
    assert read[0] == 1.0
    lender.close()


def test_a_larger_message_gets_a_larger_region() -> None:
    lender, borrower = Lender(), Borrower()
    for number, size in enumerate((LARGE, 40 * LARGE, LARGE, 80 * LARGE, LARGE)):
        lent = lender.lend([memory(number, size)], number)
        assert first(borrower, lent) == number
        lender.answered(number)
    lender.close()


def test_what_is_made_in_a_region_is_not_copied() -> None:
    lender, borrower = Lender(), Borrower()
    for number, sizes in enumerate(((LARGE, 3), (40 * LARGE, LARGE), (LARGE, 7))):
        for repeat in range(3):
            lender.begin(10 * number + repeat)
            made = [lender.empty((size,), np.dtype("float32")) for size in sizes]
            for value, array in enumerate(made):
                array[:] = value
            arrays = [memory(5.0, 9), *(memoryview(a).cast("B") for a in made)]
            lent = lender.lend(arrays, 10 * number + repeat)
            found = [np.frombuffer(m, "float32") for m in borrower.borrow(lent)]
            assert [len(each) for each in found] == [9, *sizes]
            assert [each[0] for each in found] == [5.0, 0.0, 1.0]
            assert all((each == each[0]).all() for each in found)
            assert all(each.ctypes.data % 64 == 0 for each in found)
            lender.answered(10 * number + repeat)
        # Where a message of this size has been before, its memory is the peer's.
        made[0][:] = 6.0
        assert found[1][0] == 6.0
    lender.close()


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
                for is_sequential in (True, False):
                    number = connection.begin(array, is_sequential)
                    found = connection.finish(number, SECONDS)
                    assert np.array_equal(found, array * 2)
                    is_lent = is_sequential and size >= LARGE
                    assert connection.is_lent(found) == is_lent
        total = sum((10, LARGE, 30 * LARGE, LARGE + 1)) * 4 * 10
        assert connection.sent_bytes > total and connection.received_bytes > total
    finally:
        stop.set()
        thread.join()
        connection.close()


SERVICE = """
import sys
from keras_strategies.parameter_server.wire.transport import Service, serve
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
        number = connection.begin(array, is_sequential=True)
        assert np.array_equal(connection.finish(number, SECONDS), array * 2)
        os.kill(process.pid, signal.SIGSTOP)
        number = connection.begin(array + 1, is_sequential=True)
        with pytest.raises(ClusterTimeoutError, match="did not answer within"):
            connection.finish(number, 0.2)
        number = connection.begin(array + 2, is_sequential=True)
        process.kill()
        process.wait()
        process = start()
        assert np.array_equal(connection.finish(number, SECONDS), (array + 2) * 2)
    finally:
        process.kill()
        process.wait()
        connection.close()
