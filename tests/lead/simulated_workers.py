"""Connections of many workers to a lead, in one loop, without threads."""

from __future__ import annotations

import collections
import secrets
import selectors
import socket
import time
from collections.abc import Callable

from lead.leads import SECRET, RunningLead

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
        self.beat_seconds = 0.0
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
            if kind == "facts":
                self.beat_seconds = message["beat_seconds"]
            elif kind == "begin":
                self.generation = message["generation"]
                self.send(index, "holds", generation=self.generation, step=0)
            elif kind == "end":
                self.send(index, "ready", step=0)


def compare(workers: SimulatedWorkers, count: int) -> None:
    """All workers compare a value."""
    for index in range(count):
        body = {"stream": "", "number": 0, "what": "a batch", "value": "[[8, 2]]"}
        workers.send(index, "arrived", generation=workers.generation, **body)
    workers.until("compared", count)


def send_beat(workers: SimulatedWorkers, index: int) -> None:
    """A beat of a worker."""
    facts = {"number": 1, "got": 0, "step": 0, "progress": "step 1", "times": []}
    workers.send(index, "beat", **facts, position=[0, 0, 0.0])


def beat(workers: SimulatedWorkers, count: int) -> None:
    """A beat of each worker, and its answer."""
    for index in range(count):
        send_beat(workers, index)
    workers.until("beat", count)


def ask_for_status(workers: SimulatedWorkers) -> None:
    """The table of all workers."""
    workers.send(0, "askstatus")
    workers.until("status", 1)
