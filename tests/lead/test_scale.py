"""What the lead of a thousand workers costs, by counts; times are in the benchmarks."""

from __future__ import annotations

import collections
import resource
import secrets
import selectors
import socket
import time
from collections.abc import Callable

import pytest
from lead.leads import SECRET, RunningLead

from keras_strategies.lead.events import TICK
from keras_strategies.lead.wire import NONCE, encoded, signature, take_messages

# Connections without a proof at a time.
_TOGETHER = 50


class SimulatedWorkers:
    """Connections of many workers, in one loop of this thread."""

    def __init__(self, lead: RunningLead, count: int):
        self.selector = selectors.DefaultSelector()
        self.received = 0
        self.seen: collections.Counter[str] = collections.Counter()
        self.generation = 0
        self.connected: dict[int, socket.socket] = {}
        self.buffers: dict[int, bytearray] = {}
        for first in range(0, count, _TOGETHER):
            indices = range(first, min(first + _TOGETHER, count))
            made = [socket.create_connection(lead.address, 20) for _ in indices]
            for each in made:
                theirs, own = each.recv(NONCE), secrets.token_bytes(NONCE)
                each.sendall(own + signature(SECRET, "worker", theirs, own))
            for index, each in zip(indices, made, strict=True):
                self.greet(index, each)

    def greet(self, index: int, found: socket.socket) -> None:
        assert len(found.recv(NONCE)) == NONCE
        facts = {"uid": f"{index}", "index": index, "pid": 1, "job": "", "same": {}}
        facts |= {"generation": 0, "step": None, "run_id": "", "got": 0}
        self.connected[index], self.buffers[index] = found, bytearray()
        self.send(index, "hello", **facts, continues=False)
        self.send(index, "ready", step=None)
        self.selector.register(found, selectors.EVENT_READ, index)

    def send(self, to: int, kind: str, **body: object) -> None:
        self.connected[to].sendall(encoded(kind, body))

    def leave(self, index: int) -> None:
        found = self.connected.pop(index)
        self.selector.unregister(found)
        found.close()

    def close(self) -> None:
        for index in list(self.connected):
            self.leave(index)
        self.selector.close()

    def bytes_of(self, call: Callable[[], None]) -> int:
        """Bytes that the workers have received in a call."""
        before = self.received
        call()
        return self.received - before

    def until(self, kind: str, count: int) -> None:
        """Answers messages until so many of a kind have come."""
        until = time.monotonic() + 60
        wanted = self.seen[kind] + count
        while self.seen[kind] < wanted:
            assert time.monotonic() < until, self.seen
            for key, _ in self.selector.select(1.0):
                self._read(key.data)

    def _read(self, index: int) -> None:
        buffer = self.buffers[index]
        data = self.connected[index].recv(1 << 18)
        buffer += data
        self.received += len(data)
        for message in take_messages(buffer):
            kind = message["kind"]
            self.seen[kind] += 1
            if kind == "begin":
                self.generation = message["generation"]
                self.send(index, "holds", generation=self.generation, step=0)
            elif kind == "end":
                self.send(index, "ready", step=0)


@pytest.fixture(params=[64, pytest.param(1000, marks=pytest.mark.by_day(20))])
def group(request):
    """A lead, and simulated workers that train."""
    count = request.param
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 2500)), hard))
    with RunningLead(count, timeout=60.0, patience=60.0) as lead:
        workers = SimulatedWorkers(lead, count)
        workers.until("go", count)
        yield lead, workers, count
        workers.close()
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_threads_memory_messages_and_bytes(group):
    lead, workers, count = group
    assert lead.threads == 1
    assert lead.descriptors <= count + 16
    assert lead.megabytes < 64
    assert set(workers.seen) <= {"facts", "welcome", "arrival", "begin", "go"}
    # To worker 0 alone.
    assert workers.seen["arrival"] == count
    assert workers.seen["begin"] == workers.seen["go"] == count
    assert workers.bytes_of(lambda: compare(workers, count)) / count < 100
    assert workers.bytes_of(lambda: beat(workers, count)) / count < 60
    assert workers.bytes_of(lambda: ask_for_status(workers)) < 200 * count + 200
    lose_one(workers, count)


def compare(workers, count):
    for index in range(count):
        body = {"stream": "", "number": 0, "what": "a batch", "value": "[[8, 2]]"}
        workers.send(index, "arrived", generation=1, **body)
    workers.until("compared", count)


def beat(workers, count):
    for index in range(count):
        body = {"number": 1, "got": 0, "step": 0, "progress": "step 1", "times": []}
        body["position"] = [0, 0, 0.0]
        workers.send(index, "beat", **body)
    workers.until("beat", count)


def ask_for_status(workers):
    workers.send(0, "askstatus")
    workers.until("status", 1)


def lose_one(workers, count):
    """A generation takes three messages to each worker."""
    time.sleep(TICK)
    before = sum(workers.seen.values())
    workers.leave(count // 2)
    sent = workers.bytes_of(lambda: workers.until("go", count - 1))
    # `end`, `begin` and `go`; the numbers of all members are in `begin`.
    assert sum(workers.seen.values()) - before == 3 * (count - 1)
    assert sent / count < 600 + 8 * count
    assert workers.generation == 2
