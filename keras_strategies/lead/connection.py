"""A worker's connection to the lead: one thread, which connects again when it is lost.

# Lease

The lead answers a worker's beats. A worker begins no step if its last answered beat was
sent `timeout` seconds ago: the lead may have given it up. So a worker that was stopped
first hears what has happened meanwhile.
"""

from __future__ import annotations

import contextlib
import secrets
import selectors
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from typing import Any, Protocol

from keras_strategies.lead.wire import (
    NONCE,
    SIGNATURE,
    Session,
    WireError,
    encoded,
    is_signed,
    signature,
    take_messages,
)

BEAT = 0.25
# Seconds for connecting and for the proof of the secret.
_HANDSHAKE = 5.0
# Seconds between attempts to connect.
_RETRY = 0.05
# Seconds of refused connections after which a lead that was reached has ended.
_REFUSED = 2.0
_ENDED = "it has closed the connection"
_NO_LEAD = "the program that listens there is not a chief"
_WOULD_BLOCK = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class RefusedError(Exception):
    """The lead does not accept this worker, and will not later."""


class User(Protocol):
    """What the thread calls; `changed` of the connection is not held."""

    def hello(self) -> dict[str, Any]:
        """The facts of the first message."""

    def begin_again(self) -> list[tuple[str, dict[str, Any]]]:
        """A connection without the messages before; returns those to send first."""

    def received(self, kind: str, message: dict[str, Any]) -> None:
        """A message of the lead."""

    def beat(self) -> dict[str, Any]:
        """The facts of a beat."""

    def lost(self, problem: str) -> None:
        """The connection is lost, and was not continued in time."""

    def failed(self, problem: str, was_reached: bool) -> None:
        """There is no connection for too long."""


class LeadConnection:
    """The connection of one worker.

    Args:
        addresses: hosts and ports, at one of which the lead listens.
        secret: bytes, the same in the lead.
        user: `User`.
        timeout: float, seconds to wait for the lead; later those that it says.
        tls: a context with which the connection is encrypted; None without.
    """

    def __init__(
        self,
        addresses: list[tuple[str, int]],
        secret: bytes,
        user: User,
        timeout: float,
        tls: ssl.SSLContext | None = None,
    ):
        self.addresses, self._secret, self._user = addresses, secret, user
        self._tls = tls
        #: Held while state is read or changed.
        self.changed = threading.Condition()
        #: Seconds without the lead after which this worker ends.
        self.timeout = timeout
        self.patience = timeout
        self.run_id = ""
        self.own_host = ""
        self._beat_seconds, self._grace = BEAT, 0.0
        self._session = Session()
        self._outgoing, self._received = bytearray(), bytearray()
        # On which any thread sends; None with TLS, which has no lock in Python 3.11.
        self._direct: socket.socket | None = None
        # Whether the generation is that of the last connection.
        self._continues = True
        self._beats: dict[int, float] = {}
        self._beat_number, self._next_beat = 0, 0.0
        # When the last answered beat was sent.
        self._contact = 0.0
        self._is_closed = threading.Event()
        self._waker, self._wakes = socket.socketpair()
        self._waker.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="lead", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def send(self, kind: str, body: dict[str, Any]) -> None:
        """Sends a message, from any thread, without waiting."""
        message = encoded(kind, body)
        with self.changed:
            self._session.add(message)
            self._outgoing += message
            # An error is that of the thread, too.
            with contextlib.suppress(OSError):
                if self._direct is not None and not self._flush(self._direct):
                    return
        self._wake()

    def has_lease(self) -> bool:
        """Whether the lead has not given this worker up."""
        return time.monotonic() < self._contact + self.timeout

    def close(self) -> None:
        """Ends the connection at once."""
        self._is_closed.set()
        self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(1.0)

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._waker.send(b"x")

    # The thread

    def _run(self) -> None:
        try:
            self._stay_connected()
        finally:
            self._waker.close()
            self._wakes.close()

    def _stay_connected(self) -> None:
        lost_at = refused_at = None
        while not self._is_closed.is_set():
            try:
                with self._connected() as connection:
                    lost_at = None
                    self._serve(connection)
                    return
            except RefusedError as error:
                self._user.failed(str(error), was_reached=True)
                return
            except (OSError, WireError) as error:
                now = time.monotonic()
                lost_at = lost_at or now
                is_refused = isinstance(error, ConnectionRefusedError)
                refused_at = (refused_at or now) if is_refused else None
                self._retry(error, now - lost_at, now - (refused_at or now))

    def _retry(self, error: Exception, lost: float, refused: float) -> None:
        was_reached = bool(self.run_id)
        if lost > self._grace and was_reached and self._continues:
            self._continues = False
            self._user.lost(str(error))
        if lost > self.timeout or (was_reached and refused > _REFUSED):
            problem = "nothing listens there" if refused else str(error)
            self._user.failed(problem, was_reached)
            self._is_closed.set()
        self._is_closed.wait(_RETRY)

    @contextlib.contextmanager
    def _connected(self) -> Iterator[socket.socket]:
        """A connection to the lead, after both ends have proved the secret."""
        errors: list[Exception] = []
        for address in list(self.addresses):
            try:
                connection = self._dial(address)
            except (OSError, WireError) as error:
                errors.append(error)
                continue
            self.addresses = [address]
            self._direct = connection if self._tls is None else None
            try:
                yield connection
            finally:
                with self.changed:
                    self._direct = None
                    connection.close()
            return
        raise errors[0]

    def _dial(self, address: tuple[str, int]) -> socket.socket:
        limit = min(_HANDSHAKE, max(self.timeout / 2, BEAT))
        connection = socket.create_connection(address, timeout=limit)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is not None:
                connection = self._tls.wrap_socket(connection)
            self._prove(connection)
            self._greet(connection)
        except BaseException:
            connection.close()
            raise
        connection.setblocking(False)
        return connection

    def _prove(self, connection: socket.socket) -> None:
        theirs, own = _read(connection, NONCE, _NO_LEAD), secrets.token_bytes(NONCE)
        connection.sendall(own + signature(self._secret, "worker", theirs, own))
        proof = _read(connection, SIGNATURE, "it does not accept this worker's secret")
        if not is_signed(proof, signature(self._secret, "lead", theirs, own)):
            raise WireError("the program there does not know this cluster's secret")

    def _greet(self, connection: socket.socket) -> None:
        """Says hello, and reads the lead's answer."""
        hello = self._user.hello() | {
            "run_id": self.run_id,
            "got": self._session.received,
            "continues": self._continues,
        }
        connection.sendall(encoded("hello", hello))
        received = bytearray()
        while not (messages := take_messages(received)):
            received += _read(connection, 1, most=1 << 16)
        answer, *rest = messages
        if answer["kind"] == "refused":
            raise (RefusedError if answer["is_final"] else WireError)(answer["error"])
        self.own_host = str(connection.getsockname()[0])
        self._received[:] = received
        self._welcome(answer)
        for message in rest:
            self._handle(message)

    def _welcome(self, facts: dict[str, Any]) -> None:
        self.timeout, self.patience = facts["timeout"], facts["patience"]
        self._beat_seconds, self._grace = facts["beat_seconds"], facts["grace"]
        self.run_id = facts["run_id"]
        self._next_beat = 0.0
        with self.changed:
            if facts["is_resumed"]:
                self._session.acknowledge(facts["got"])
                self._outgoing[:] = self._session.rest()
            else:
                self._session = Session()
                self._outgoing.clear()
                for kind, body in self._user.begin_again():
                    self.send(kind, body)
            self._continues = True

    def _serve(self, connection: socket.socket) -> None:
        """Sends and receives until the connection ends, or the lead is silent."""
        silent, counted = 0.0, time.monotonic()
        with selectors.DefaultSelector() as selector:
            selector.register(self._wakes, selectors.EVENT_READ)
            selector.register(connection, events := selectors.EVENT_READ)
            while not self._is_closed.is_set():
                before, events = events, selectors.EVENT_READ
                if self._flush(connection):
                    events |= selectors.EVENT_WRITE
                if events != before:
                    selector.modify(connection, events)
                ready = selector.select(max(0.0, self._next_beat - time.monotonic()))
                now = time.monotonic()
                # A pause of this process is no silence of the lead.
                silent += min(now - counted, 2 * self._beat_seconds)
                counted = now
                for key, _ in ready:
                    if key.fileobj is self._wakes:
                        self._wakes.recv(4096)
                    elif self._receive(connection):
                        silent = 0.0
                if silent > self.timeout / 2:
                    raise WireError(f"no answer for {silent:.0f} s")
                if now >= self._next_beat:
                    self._beat(now)
            with self.changed, contextlib.suppress(OSError):
                connection.setblocking(True)
                connection.settimeout(1.0)
                connection.sendall(self._outgoing)

    def _beat(self, now: float) -> None:
        self._beat_number += 1
        self._beats[self._beat_number] = now
        self._next_beat = now + self._beat_seconds
        facts = {"number": self._beat_number, "got": self._session.received}
        message = encoded("beat", facts | self._user.beat())
        with self.changed:
            self._outgoing += message

    def _flush(self, connection: socket.socket) -> bool:
        """Sends what the connection takes; returns whether there is more."""
        with self.changed:
            if self._outgoing:
                with contextlib.suppress(*_WOULD_BLOCK):
                    del self._outgoing[: connection.send(self._outgoing)]
            return bool(self._outgoing)

    def _receive(self, connection: socket.socket) -> bool:
        """Receives messages; returns whether there were some."""
        found = False
        while True:
            try:
                data = connection.recv(1 << 18)
            except _WOULD_BLOCK:
                return found
            if not data:
                raise WireError(_ENDED)
            found = True
            self._received += data
            for message in take_messages(self._received):
                self._handle(message)
            if self._tls is None:
                return found

    def _handle(self, message: dict[str, Any]) -> None:
        kind = message.pop("kind")
        if kind == "beat":
            with self.changed:
                self._session.acknowledge(message["got"])
            sent = self._beats.pop(message["number"], None)
            if sent is not None:
                self._contact = max(self._contact, sent)
                self._beats = {n: t for n, t in self._beats.items() if t > sent}
        elif kind != "log":
            self._session.received += 1
        self._user.received(kind, message)


def _read(
    connection: socket.socket, size: int, ended: str = _ENDED, most: int = 0
) -> bytes:
    """At least `size` bytes, at most so many or `most`."""
    found = b""
    while len(found) < size:
        data = connection.recv(max(size, most) - len(found))
        if not data:
            raise WireError(ended)
        found += data
    return found
