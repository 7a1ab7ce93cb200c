"""Requests and replies between processes, over ZeroMQ.

Processes of one machine use Unix sockets in a folder of their user. Between machines it
is TCP, authenticated and encrypted by CurveZMQ with the keys of the cluster. All waits
have timeouts.

A `Service` receives requests, a `Connection` sends them.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import pickle
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from keras_strategies.errors import ClusterTimeoutError, PeerError
from keras_strategies.parameter_server.wire import shared_buffers
from keras_strategies.parameter_server.wire.array_messages import nbytes, pack, unpack
from keras_strategies.parameter_server.wire.row_arrays import Empty, empty_aligned
from keras_strategies.parameter_server.wire.shared_buffers import (
    SharedBufferReader,
    SharedBufferWriter,
)
from keras_strategies.processes.portable_exceptions import portable_exception

#: Callable of a request and of an allocator of arrays that returns the reply.
Handle = Callable[[Any, Empty], Any]

#: Bytes below which ZeroMQ's zero-copy sending is slower than a copy.
COPY_BYTES = 65536
#: Last frame of a message with arrays in shared memory; other frames are not empty.
_SHARED = b""
#: Milliseconds for unsent messages of a closed socket.
_LINGER_MS = 500
#: Seconds between calls of `check` while waiting for a reply.
_CHECK_SECONDS = 0.25


@dataclass(frozen=True)
class Keys:
    """CurveZMQ keys, the same in all processes of a cluster.

    Args:
        service_public: bytes.
        service_secret: bytes.
        client_public: bytes.
        client_secret: bytes.
    """

    service_public: bytes
    service_secret: bytes
    client_public: bytes
    client_secret: bytes

    @classmethod
    def new(cls) -> Keys:
        import zmq

        return cls(*zmq.curve_keypair(), *zmq.curve_keypair())

    @classmethod
    def from_secret(cls, secret: str) -> Keys:
        """Keys derived from a shared secret."""
        import zmq
        from zmq.utils import z85

        def pair(name: str) -> tuple[bytes, bytes]:
            digest = hashlib.sha256(f"{name}:{secret}".encode()).digest()
            private = z85.encode(digest)
            return zmq.curve_public(private), private

        return cls(*pair("service"), *pair("client"))


def _needs_keys(address: str) -> bool:
    return address.startswith("tcp://")


class _ClientKeyCheck:
    """Accepts clients with the cluster's client key."""

    def __init__(self, keys: Keys):
        self._public = keys.client_public

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._public


class Service:
    """Receives requests at an address, in the thread that calls `serve`.

    Args:
        address: str, `"ipc://..."` or `"tcp://host:port"`; port 0 for a free one.
        keys: `Keys`, needed for TCP.
    """

    def __init__(self, address: str, keys: Keys | None = None):
        import zmq

        self._zmq = zmq
        self._context = zmq.Context()
        self._authenticator: Any = None
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = _LINGER_MS
        # A reconnected peer replaces its earlier connection.
        self._socket.router_handover = True
        if _needs_keys(address):
            assert keys is not None, "TCP needs keys"
            self._authenticate(keys)
        if address.endswith(":0"):
            port = self._socket.bind_to_random_port(address[:-2])
            address = f"{address[:-1]}{port}"
        else:
            self._socket.bind(address)
        self.address = address
        self.received_bytes = 0
        self.sent_bytes = 0
        # Shared memory by peer.
        self._peers: dict[bytes, _SharedBuffers] = {}
        # `wake` interrupts the poll through this pair of sockets.
        name = f"inproc://wake-{id(self)}"
        self._wake_in = self._context.socket(zmq.PULL)
        self._wake_in.bind(name)
        self._wake_name = name
        self._wake_lock = threading.Lock()
        self._wake_out: Any = None
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wake_in, zmq.POLLIN)

    def _authenticate(self, keys: Keys) -> None:
        from zmq.auth.thread import ThreadAuthenticator

        self._authenticator = ThreadAuthenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback("*", _ClientKeyCheck(keys))
        self._socket.curve_server = True
        self._socket.curve_publickey = keys.service_public
        self._socket.curve_secretkey = keys.service_secret

    def wake(self) -> None:
        """Interrupts `receive`; may be called in other threads."""
        with self._wake_lock:
            if self._context.closed:
                return
            if self._wake_out is None:
                self._wake_out = self._context.socket(self._zmq.PUSH)
                self._wake_out.linger = 0
                self._wake_out.connect(self._wake_name)
            with contextlib.suppress(self._zmq.Again):
                self._wake_out.send(b"", self._zmq.DONTWAIT)

    def receive(self, timeout: float | None = None) -> tuple[bytes, Any] | None:
        """The next message and its sender; None after the timeout or `wake`.

        Args:
            timeout: float, seconds; None for no limit.
        """
        milliseconds = None if timeout is None else max(0, int(timeout * 1000))
        ready = dict(self._poller.poll(milliseconds))
        if self._wake_in in ready:
            with contextlib.suppress(self._zmq.Again):
                while True:
                    self._wake_in.recv(self._zmq.DONTWAIT)
        if self._socket not in ready:
            return None
        sender, *frames = self._socket.recv_multipart(copy=False)
        buffers = [frame.buffer for frame in frames]
        name = sender.bytes
        if _is_shared(buffers):
            try:
                buffers = self._shared_buffers(name).read(buffers)
            except OSError:
                return None  # The peer has died.
        self.received_bytes += nbytes(buffers)
        return name, unpack(buffers)

    def _shared_buffers(self, peer: bytes) -> _SharedBuffers:
        if peer not in self._peers:
            for gone in [
                n for n, buffers in self._peers.items() if not buffers.is_alive
            ]:
                self._peers.pop(gone).close()
            self._peers[peer] = _SharedBuffers()
        return self._peers[peer]

    def begin(self, receiver: bytes, turn: int | None) -> Empty:
        """Starts a reply; returns the allocator of its arrays.

        Args:
            receiver: bytes, the peer.
            turn: int, as for `send`.
        """
        if turn is None:
            return empty_aligned
        writer = self._shared_buffers(receiver).writer
        # The peer has read all replies before the previous one.
        writer.answered(turn - 1)
        writer.begin(turn)
        return writer.empty

    def send(self, receiver: bytes, message: Any, turn: int | None = None) -> None:
        """Sends a message to a peer; dropped if the peer is gone.

        Args:
            receiver: bytes, the peer.
            message: any picklable object.
            turn: int, number of the request among those with shared memory; None for
                other requests.
        """
        parts = pack(message)
        self.sent_bytes += nbytes(parts)
        if turn is not None:
            parts = self._shared_buffers(receiver).write(parts, turn)
        self._socket.send(receiver, self._zmq.SNDMORE)
        _send(self._socket, parts)

    def close(self) -> None:
        """Stops listening."""
        if self._authenticator is not None:
            self._authenticator.stop()
        with self._wake_lock:
            if self._wake_out is not None:
                self._wake_out.close()
            self._wake_in.close()
            self._socket.close()
            self._context.term()
        for buffers in self._peers.values():
            buffers.close()


def _is_shared(buffers: Sequence[Any]) -> bool:
    return len(buffers) == 3 and not len(buffers[2])


class _SharedBuffers:
    """Shared memory of two processes of one machine, on one side."""

    def __init__(self) -> None:
        self.writer = SharedBufferWriter()
        self.reader = SharedBufferReader()
        self._pid: int | None = None

    def write(self, parts: list[Any], number: int) -> list[Any]:
        """Moves the arrays of a message to shared memory, if they are large."""
        if nbytes(parts[1:]) < shared_buffers.LEAST_BYTES:
            return parts
        return [parts[0], pickle.dumps(self.writer.write(parts[1:], number)), _SHARED]

    def read(self, buffers: Sequence[Any]) -> list[Any]:
        """The parts of a message, with arrays from shared memory."""
        reference = pickle.loads(buffers[1])
        self._pid = reference.pid
        return [buffers[0], *self.reader.read(reference)]

    @property
    def is_alive(self) -> bool:
        """Whether the peer's process exists; True if unknown."""
        return self._pid is None or os.path.exists(f"/proc/{self._pid}")

    def close(self) -> None:
        self.writer.close()


class Connection:
    """Connection to a service; for one thread.

    A request is repeated after a restart of the service; updates have names, so that
    each is applied once.

    Args:
        address: str, the service's.
        keys: `Keys`, needed for TCP.
        peer: str, name of the service in errors, such as `"parameter server 0"`.
        check: called periodically while waiting; raises to end the wait.
    """

    def __init__(
        self,
        address: str,
        keys: Keys | None = None,
        peer: str = "the peer",
        check: Callable[[], None] | None = None,
    ):
        import zmq

        self._check = check

        self._zmq = zmq
        self.address = address
        self.peer = peer
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = _LINGER_MS
        self._socket.sndhwm = self._socket.rcvhwm = 0
        self._socket.reconnect_ivl = 20
        self._socket.reconnect_ivl_max = 500
        if _needs_keys(address):
            assert keys is not None, "TCP needs keys"
            self._socket.curve_serverkey = keys.service_public
            self._socket.curve_publickey = keys.client_public
            self._socket.curve_secretkey = keys.client_secret
        events = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED
        self._monitor = self._socket.get_monitor_socket(events)
        #: Time of the disconnection; None while connected or never connected.
        self.lost_since: float | None = None
        #: Number of reconnections.
        self.reconnects = 0
        self._socket.connect(address)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self._numbers = itertools.count(1)
        self._replies: dict[int, Any] = {}
        # Unanswered requests, repeated after a reconnection.
        self._waiting: dict[int, list[Any]] = {}
        self.received_bytes = 0
        self.sent_bytes = 0
        can_share = address.startswith("ipc://") and shared_buffers.IS_AVAILABLE
        self._shared_buffers = _SharedBuffers() if can_share else None
        self._turns = itertools.count(1)

    def begin(self, message: Any, shares_memory: bool = False) -> int:
        """Sends a request without waiting; returns its number for `finish`.

        Args:
            message: any picklable object.
            shares_memory: bool, whether large arrays may be in shared memory: those of
                the reply must have been read when the request after the next one
                is sent.
        """
        number = next(self._numbers)
        shares = shares_memory and self._shared_buffers is not None
        turn = next(self._turns) if shares else None
        parts = pack((number, message, turn))
        self.sent_bytes += nbytes(parts)
        if shares:
            assert self._shared_buffers is not None
            parts = self._shared_buffers.write(parts, number)
        self._waiting[number] = parts
        _send(self._socket, parts)
        return number

    def request(self, message: Any, timeout: float) -> Any:
        """Sends a request and waits for its reply (see `finish`)."""
        return self.finish(self.begin(message), timeout)

    def post(self, message: Any) -> None:
        """Sends a message that has no reply."""
        self._send(pack(message))

    def _send(self, parts: list[Any]) -> None:
        self.sent_bytes += nbytes(parts)
        _send(self._socket, parts)

    def finish(self, number: int, timeout: float) -> Any:
        """Waits for the reply to a request.

        Args:
            number: int, as `begin` returned it.
            timeout: float, seconds.

        Raises:
            RuntimeError: `ClusterTimeoutError` without a reply in time, `PeerError` for
                an error of the service.
        """
        until = time.monotonic() + timeout
        while number not in self._replies:
            left = until - time.monotonic()
            wait = left if self._check is None else min(left, _CHECK_SECONDS)
            message = self.receive(wait)
            if message is None:
                if self._check is not None:
                    self._check()
                if time.monotonic() < until:
                    continue
                del self._waiting[number]
                raise ClusterTimeoutError(
                    f"{self.peer} at {self.address} did not answer within "
                    f"{timeout:g} seconds. It may be dead, stopped or too busy. "
                    "`timeout_seconds` of the strategy sets the timeout."
                )
            found, reply = message
            if self._shared_buffers is not None:
                self._shared_buffers.writer.answered(found)
            # A repeated request may have two replies.
            if self._waiting.pop(found, None) is not None:
                self._replies[found] = reply
        status, value = self._replies.pop(number)
        if status == "error":
            raise value if isinstance(value, Exception) else PeerError(str(value))
        return value

    def receive(self, timeout: float) -> Any:
        """The next message; None after `timeout` seconds."""
        ready = dict(self._poller.poll(max(0, int(timeout * 1000))))
        if self._monitor in ready:
            self._watch()
        if self._socket not in ready:
            return None
        frames = self._socket.recv_multipart(copy=False)
        buffers = [frame.buffer for frame in frames]
        if self._shared_buffers is not None and _is_shared(buffers):
            try:
                buffers = self._shared_buffers.read(buffers)
            except OSError:
                return None  # The service died; the repeated request will be answered.
        self.received_bytes += nbytes(buffers)
        return unpack(buffers)

    def is_shared(self, array: np.ndarray) -> bool:
        """Whether an array is in shared memory that later replies overwrite."""
        return self._shared_buffers is not None and self._shared_buffers.reader.has(
            array
        )

    def _watch(self) -> None:
        """Handles disconnections; repeats unanswered requests after a reconnection.

        Updates have names, so that none is applied twice.
        """
        from zmq.utils.monitor import recv_monitor_message

        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            if event == self._zmq.EVENT_DISCONNECTED:
                self.lost_since = self.lost_since or time.monotonic()
            elif self.lost_since is not None:
                self.lost_since = None
                self.reconnects += 1
                for parts in self._waiting.values():
                    _send(self._socket, parts)

    def is_lost_for(self, seconds: float) -> bool:
        """Whether an earlier connection has been lost for so many seconds."""
        since = self.lost_since
        return since is not None and time.monotonic() - since > seconds

    def close(self) -> None:
        """Closes the connection."""
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close()
        self._context.term()
        if self._shared_buffers is not None:
            self._shared_buffers.close()


def _send(socket: Any, parts: Sequence[Any]) -> None:
    import zmq

    last = len(parts) - 1
    for i, part in enumerate(parts):
        size = part.nbytes if isinstance(part, memoryview) else len(part)
        flags = zmq.SNDMORE if i < last else 0
        socket.send(part, flags, copy=size < COPY_BYTES)


def serve(
    service: Service,
    handle: Handle,
    until: Callable[[], bool],
    idle: Callable[[], None] = lambda: None,
    every: float = 0.2,
) -> None:
    """Answers requests one after the other.

    Args:
        service: receives the requests.
        handle: callable of a request and of an allocator of arrays for the reply, in
            shared memory if possible; returns the reply. An exception becomes the reply
            and is raised in the requesting process.
        until: callable; whether to end, called after each request.
        idle: callable, called periodically.
        every: float, seconds between calls of `idle`.
    """
    due = time.monotonic() + every
    while not until():
        received = service.receive(max(0.0, due - time.monotonic()))
        if received is not None:
            sender, (number, message, turn) = received
            reply = answer(handle, message, service.begin(sender, turn))
            service.send(sender, (number, reply), turn)
        if time.monotonic() >= due:
            idle()
            due = time.monotonic() + every


def answer(
    handle: Handle, message: Any, empty: Empty = empty_aligned
) -> tuple[str, Any]:
    """Result of a request: `("ok", reply)` or `("error", exception)`."""
    try:
        return "ok", handle(message, empty)
    except Exception as error:  # Raised in the requesting process.
        return "error", portable_exception(error, "in another process", PeerError)
