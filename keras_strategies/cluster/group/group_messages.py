"""Messages between workers and the hub: a header in JSON, and bytes."""

from __future__ import annotations

import collections
import contextlib
import json
import os
import queue
import select
import socket
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

Message = tuple[dict[str, Any], bytes]

# Interval of heartbeats in seconds.
BEAT = 0.25
# Bytes of a message that a connection takes at once where it takes any: a socket is
# writable with a third of its buffer free on Linux, with 2,048 bytes on macOS.
_SMALL = 2000
# Reason for the loss of a worker with an open connection.
NO_HEARTBEAT = "no heartbeat"
# Reason for the loss of a worker that is alive, and does not arrive where others wait.
NO_ARRIVAL = "the others have waited for it"
# Reason for the loss of a worker that has come to the end of its script.
EXITED = "it exited"


class Silence:
    """Time since the last message of another process, without pauses of this one.

    A process that was stopped, or busy in one call, has received nothing in that time,
    and would report live workers as lost.
    """

    def __init__(self) -> None:
        self._seconds = 0.0
        self._counted = time.monotonic()

    def reset(self) -> None:
        """Restarts the time, after a message."""
        self._seconds = 0.0

    def count(self) -> float:
        """Seconds; called every `BEAT` seconds, a longer interval is a pause."""
        now = time.monotonic()
        self._seconds += min(now - self._counted, 2 * BEAT)
        self._counted = now
        return self._seconds


def encoded(header: dict[str, Any], payload: bytes = b"") -> bytes:
    """The bytes of a message."""
    return json.dumps(header).encode() + b"\n" + payload


class MessageConnection:
    """One end of a connection; `send` is thread-safe.

    A stopped receiver cannot block the caller: what the connection does not take at
    once is sent by a separate thread.
    """

    def __init__(self, connected: socket.socket):
        self.own_host = str(connected.getsockname()[0])
        self.other_host = str(connected.getpeername()[0])
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.settimeout(None)
        self._connection = Connection(connected.detach())
        self._writable = select.poll()
        self._writable.register(self._connection.fileno(), select.POLLOUT)
        # Held while a message is sent, or taken from those that wait.
        self._turn = threading.Lock()
        self._waiting: collections.deque[bytes] = collections.deque()
        # An item for each message that waits; None ends the thread.
        self._wakes: queue.SimpleQueue[bool | None] = queue.SimpleQueue()
        # Held from when the thread is started.
        self._has_sender = threading.Lock()
        self._sender: threading.Thread | None = None

    def send(self, header: dict[str, Any], payload: bytes = b"") -> None:
        self.send_encoded(encoded(header, payload))

    def send_encoded(self, message: bytes) -> None:
        """Sends a message that is `encoded`, as to many receivers.

        It waits for no lock: a handler of a signal, or a finalizer, may send while it
        interrupts a call of the same thread.
        """
        if len(message) <= _SMALL and self._turn.acquire(blocking=False):
            try:
                if not self._waiting and self._writable.poll(0):
                    self._send(message)
                    return
            finally:
                self._turn.release()
        self._waiting.append(message)
        self._wakes.put(True)
        if self._has_sender.acquire(blocking=False):
            self._sender = threading.Thread(
                target=self._send_waiting, name="group-sender", daemon=True
            )
            self._sender.start()

    def _send(self, message: bytes) -> None:
        # The reader detects the end of the connection.
        with contextlib.suppress(OSError):
            self._connection.send_bytes(message)

    def _send_waiting(self) -> None:
        while self._wakes.get() is not None:
            with self._turn:
                self._send(self._waiting.popleft())

    def wait(self, timeout: float) -> bool:
        """Waits for a message or the end of the connection; False after the timeout.

        Raises:
            EOFError: if this end is closed.
        """
        try:
            return self._connection.poll(timeout)
        except OSError as error:
            raise EOFError(str(error)) from error

    def receive(self, timeout: float | None = None) -> Message | None:
        """The next message; None after the timeout.

        Raises:
            EOFError: if the connection has ended, or the other end is not a worker.
        """
        try:
            if timeout is not None and not self._connection.poll(timeout):
                return None
            header, _, payload = self._connection.recv_bytes().partition(b"\n")
            found = json.loads(header)
        except (OSError, ValueError) as error:
            raise EOFError(str(error)) from error
        if not isinstance(found, dict):
            raise EOFError("The received bytes are not a worker message.")
        return found, payload

    def close(self, wait: float = 1.0) -> None:
        """Closes the connection after the pending messages."""
        self._wakes.put(None)
        if (sender := self._sender) is not None:
            sender.join(wait)
        self.abort()

    def abort(self) -> None:
        """Ends the connection at once; the readers at both ends get an error."""
        self._wakes.put(None)
        # The last reference closes the descriptor. Closed here, its number could be
        # reused while a reader of this process waits on it.
        try:
            with socket.socket(fileno=os.dup(self._connection.fileno())) as duplicate:
                duplicate.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass


def server_at(address: str, port: int) -> socket.socket:
    """A socket that listens at an address, IPv4 or IPv6, of this machine."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=128)


def accepted(server: socket.socket) -> Iterator[socket.socket]:
    """Connections to a listening socket, until it is closed."""
    while True:
        try:
            connected, _ = server.accept()
        except OSError:
            return
        yield connected


def first_message(
    connected: socket.socket, timeout: float
) -> tuple[MessageConnection, dict[str, Any]] | None:
    """A new connection, and the header of its first message.

    Args:
        connected: an accepted connection.
        timeout: float, seconds to wait; without a message the header is empty.

    Returns:
        None if the connection has ended, as that of a probe of the port.
    """
    try:
        connection = MessageConnection(connected)
    except OSError:
        return None
    try:
        message = connection.receive(timeout)
    except EOFError:
        connection.abort()
        return None
    return connection, {} if message is None else message[0]
