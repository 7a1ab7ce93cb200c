"""Service side of requests between processes, over ZeroMQ.

Processes of one machine use Unix sockets in a folder of their user. Those of several
machines use TCP, authenticated and encrypted by CurveZMQ with the keys of the cluster.
All waits have timeouts.

A `Service` receives requests, a `Connection` sends them.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

from keras_strategies.cluster.own_address import own_address
from keras_strategies.cluster.spec import split_address
from keras_strategies.parameter_server.wire.arrays.array_messages import (
    nbytes,
    pack,
    send,
    unpack,
)
from keras_strategies.parameter_server.wire.arrays.row_arrays import (
    Empty,
    empty_aligned,
)
from keras_strategies.parameter_server.wire.arrays.shared_buffers import (
    SharedBuffers,
    is_shared,
)
from keras_strategies.parameter_server.wire.cluster_keys import (
    ClientKeyCheck,
    Keys,
    needs_keys,
)
from keras_strategies.parameter_server.wire.request_connection import LINGER_MS
from keras_strategies.processes.portable_exceptions import PortableException

#: Callable of a request and of an allocator of arrays that returns the reply.
Handle = Callable[[Any, Empty], Any]


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
        self._socket.linger = LINGER_MS
        # A reconnected peer replaces its earlier connection.
        self._socket.router_handover = True
        if needs_keys(address):
            assert keys is not None, "TCP needs keys"
            self._authenticate(keys)
        if address.endswith(":0"):
            port = self._socket.bind_to_random_port(address[:-2])
            address = f"{address[:-1]}{port}"
        else:
            self._socket.bind(_listening_address(address))
        self.address = address
        self.received_bytes = 0
        self.sent_bytes = 0
        # Shared memory by peer.
        self._peers: dict[bytes, SharedBuffers] = {}
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
        self._authenticator.configure_curve_callback("*", ClientKeyCheck(keys))
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
        if is_shared(buffers):
            try:
                buffers = self._shared_buffers(name).read(buffers)
            except OSError:
                return None  # The peer has died.
        self.received_bytes += nbytes(buffers)
        return name, unpack(buffers)

    def _shared_buffers(self, peer: bytes) -> SharedBuffers:
        if peer not in self._peers:
            for gone in [
                n for n, buffers in self._peers.items() if not buffers.is_alive
            ]:
                self._peers.pop(gone).close()
            self._peers[peer] = SharedBuffers(regions=2)
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
        """Sends a message to a peer; dropped if the peer has ended.

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
        send(self._socket, parts)

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


def _listening_address(address: str) -> str:
    """The address to listen at."""
    if not needs_keys(address):
        return address
    host, port = split_address(address)
    own = own_address(host)
    return address if own == host else f"tcp://{own}:{port}"


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
    """Result of a request: `("ok", reply)` or `("error", PortableException)`."""
    try:
        return "ok", handle(message, empty)
    except Exception as error:  # Raised in the requesting process.
        return "error", PortableException.of(error, "in another process")
