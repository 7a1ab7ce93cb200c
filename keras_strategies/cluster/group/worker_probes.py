"""Probes: other workers as alive, stopped, dead or unreachable."""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from keras_strategies.cluster.group.group_messages import BEAT, MessageConnection
from keras_strategies.cluster.group.rendezvous_listener import RendezvousListener
from keras_strategies.cluster.spec import split_address

DEAD, STOPPED, UNREACHABLE, ALIVE = "dead", "stopped", "unreachable", "alive"
# A host that answers, but without a listener at the port.
_REFUSED = (errno.ECONNREFUSED, errno.ECONNRESET)


@dataclass
class ProbeResult:
    """Result of a probe.

    Args:
        state: str, `DEAD`, `STOPPED`, `UNREACHABLE` or `ALIVE`.
        answer: dict, the message of a worker that is alive.
    """

    state: str
    answer: dict[str, Any] = field(default_factory=dict)


class WorkerProbes:
    """Probes of the other workers by one worker, and their results.

    Args:
        listener: `RendezvousListener` of this worker.
        message: callable without arguments; returns the message of a probe.
    """

    def __init__(
        self, listener: RendezvousListener, message: Callable[[], dict[str, Any]]
    ):
        self._own = listener
        self._message = message
        # A worker that has sent no heartbeat for the timeout.
        self._silent: int | None = None
        #: Workers that have accepted a connection since `reset` without an answer.
        self.stopped: set[int] = set()
        #: Workers that could not be reached since `reset`.
        self.unreachable: set[int] = set()

    def reset(self, silent: int | None) -> None:
        """Begins the probes for another generation.

        Args:
            silent: int or None, a worker that has sent no heartbeat for the timeout.
        """
        self._silent = silent
        self.stopped.clear()
        self.unreachable.clear()

    def answer_time(self, index: int) -> float:
        """Seconds to wait for the first answer of a worker."""
        timeout = self._own.limits.timeout
        return min(timeout, 2 * BEAT) if index == self._silent else timeout

    def connect(self, index: int) -> MessageConnection:
        """A connection to a worker.

        Raises:
            OSError: if it cannot be reached.
        """
        host, port = split_address(self._own.addresses[index])
        return MessageConnection(
            socket.create_connection((host, port), timeout=self._own.limits.timeout)
        )

    def repeat(
        self, index: int, findings: dict[int, ProbeResult], ended: threading.Event
    ) -> None:
        """Probes a worker until `ended` is set, and puts its states into `findings`."""
        while not ended.is_set() and not self._own.closed.is_set():
            found = self._probe(index)
            if found is not None:
                with self._own.changed:
                    findings[index] = found
                    self._note_reachability(index, found)
                    self._own.changed.notify_all()
            ended.wait(BEAT)

    def _note_reachability(self, index: int, found: ProbeResult) -> None:
        """Records whether a worker could be reached.

        Another partition of the network may have continued with the worker, even if it
        has ended or stopped since: only its own answer clears the record.
        """
        if found.state == UNREACHABLE:
            self.unreachable.add(index)
        elif found.answer.get("uid") == self._own.previous.get(index):
            self.unreachable.discard(index)

    def _probe(self, index: int) -> ProbeResult | None:
        """The state of a worker; None if it is not clear."""
        try:
            connection = self.connect(index)
        except OSError as error:
            return _not_connected(error)
        connection.send(self._message())
        try:
            received = connection.receive(self.answer_time(index))
        except EOFError:
            return None
        finally:
            connection.abort()
        if received is None:
            return self.without_answer(index)
        return ProbeResult(ALIVE, received[0])

    def without_answer(self, index: int) -> ProbeResult:
        """The state of a worker that has accepted a connection and not answered."""
        try:
            # The network may have failed since.
            self.connect(index).abort()
        except OSError as error:
            return _not_connected(error)
        return ProbeResult(STOPPED)


def _not_connected(error: OSError) -> ProbeResult:
    return ProbeResult(DEAD if error.errno in _REFUSED else UNREACHABLE)


def state_of(findings: dict[int, ProbeResult], index: int) -> str:
    """The state of a worker; unreachable before the end of its first probe."""
    found = findings.get(index)
    return found.state if found is not None else UNREACHABLE
