"""How messages get from process to process: requests and replies over ZeroMQ.

Processes on one machine use Unix sockets in a folder that only their user may enter;
between machines it is TCP, authenticated and encrypted by CurveZMQ with keys that all
processes of the cluster, and no others, have been given. Everything has a deadline.

`Service` and `Connection` are all that the rest of the package knows of it; workers may
have another `Channel` to the servers (`ray_channel`).
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from keras_strategies.coordinator.channel import Channel
from keras_strategies.coordinator.messages import nbytes, pack, unpack
from keras_strategies.errors import ClusterTimeoutError, PeerError

# Below so many bytes a copy costs less than keeping track of the memory.
_COPY_BYTES = 65536
#: Milliseconds that a socket may go on sending when it is closed.
_LINGER_MS = 500


@dataclass(frozen=True)
class Keys:
    """The keys of a cluster (CurveZMQ), which every process of it gets.

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
        """The keys that every process with the same secret has."""
        import zmq
        from zmq.utils import z85

        def pair(name: str) -> tuple[bytes, bytes]:
            digest = hashlib.sha256(f"{name}:{secret}".encode()).digest()
            private = z85.encode(digest)
            return zmq.curve_public(private), private

        return cls(*pair("service"), *pair("client"))


def _needs_keys(address: str) -> bool:
    return address.startswith("tcp://")


class _OnlyClients:
    """Lets in who has the cluster's client key."""

    def __init__(self, keys: Keys):
        self._public = keys.client_public

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._public


class Service:
    """Answers requests at an address, in the thread that calls `serve`.

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
        # One frame for the peer that is gone is better than a blocked service.
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
        # Other threads wake the loop through this pair.
        name = f"inproc://wake-{id(self)}"
        self._wake_in = self._context.socket(zmq.PULL)
        self._wake_in.bind(name)
        self._wake_name = name
        self._wake_lock = threading.Lock()
        self._wake_out: Any = None

    def _authenticate(self, keys: Keys) -> None:
        from zmq.auth.thread import ThreadAuthenticator

        self._authenticator = ThreadAuthenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback("*", _OnlyClients(keys))
        self._socket.curve_server = True
        self._socket.curve_publickey = keys.service_public
        self._socket.curve_secretkey = keys.service_secret

    def wake(self) -> None:
        """Ends a wait in `receive` that is under way; for other threads."""
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
        """The next message and who sent it; None when it took too long, or woken.

        Args:
            timeout: float, seconds; None to wait for as long as it takes.
        """
        milliseconds = None if timeout is None else max(0, int(timeout * 1000))
        poller = self._zmq.Poller()
        poller.register(self._socket, self._zmq.POLLIN)
        poller.register(self._wake_in, self._zmq.POLLIN)
        ready = dict(poller.poll(milliseconds))
        if self._wake_in in ready:
            with contextlib.suppress(self._zmq.Again):
                while True:
                    self._wake_in.recv(self._zmq.DONTWAIT)
        if self._socket not in ready:
            return None
        sender, *frames = self._socket.recv_multipart(copy=False)
        buffers = [frame.buffer for frame in frames]
        self.received_bytes += nbytes(buffers)
        return sender.bytes, unpack(buffers)

    def send(self, receiver: bytes, message: Any) -> None:
        """Sends a message to a peer; one that is gone gets nothing."""
        parts = pack(message)
        self.sent_bytes += nbytes(parts)
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


class Connection(Channel):
    """Sends requests to a service, and matches the replies. For one thread.

    Args:
        address: str, the service's.
        keys: `Keys`, needed for TCP.
        peer: str, what the service is to people, such as `"parameter server 0"`.
    """

    def __init__(self, address: str, keys: Keys | None = None, peer: str = "the peer"):
        import zmq

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
        #: When the service went away; None while it is there, or has not come yet.
        self.lost_since: float | None = None
        #: How often it has come back.
        self.returns = 0
        self._socket.connect(address)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self._numbers = itertools.count(1)
        self._replies: dict[int, Any] = {}
        # What has not been answered, to be sent again to a service that came back.
        self._waiting: dict[int, list[Any]] = {}
        self.received_bytes = 0
        self.sent_bytes = 0

    def begin(self, message: Any) -> int:
        """Sends a request without waiting; the number to ask for its reply with."""
        number = next(self._numbers)
        self._waiting[number] = parts = pack((number, message))
        self._send(parts)
        return number

    def post(self, message: Any) -> None:
        """Sends a message that has no reply."""
        self._send(pack(message))

    def _send(self, parts: list[Any]) -> None:
        self.sent_bytes += nbytes(parts)
        _send(self._socket, parts)

    def finish(self, number: int, timeout: float) -> Any:
        """The reply to a request.

        Args:
            number: int, as `begin` returned it.
            timeout: float, seconds.

        Raises:
            RuntimeError: `ClusterTimeoutError` if there is none in time, `PeerError`
                with what went wrong at the service.
        """
        until = time.monotonic() + timeout
        while number not in self._replies:
            message = self.receive(until - time.monotonic())
            if message is None:
                if time.monotonic() < until:
                    continue
                del self._waiting[number]
                raise ClusterTimeoutError(
                    f"{self.peer} at {self.address} did not answer within "
                    f"{timeout:g} seconds. It may have died, be stopped, or be too "
                    "busy; `timeout_seconds` of the strategy changes the wait."
                )
            found, reply = message
            # Of a request that was sent twice, one reply is enough.
            if self._waiting.pop(found, None) is not None:
                self._replies[found] = reply
        status, value = self._replies.pop(number)
        if status == "error":
            raise value if isinstance(value, Exception) else PeerError(str(value))
        return value

    def receive(self, timeout: float) -> Any:
        """The next message, whatever it is; None after `timeout` seconds."""
        ready = dict(self._poller.poll(max(0, int(timeout * 1000))))
        if self._monitor in ready:
            self._watch()
        if self._socket not in ready:
            return None
        frames = self._socket.recv_multipart(copy=False)
        buffers = [frame.buffer for frame in frames]
        self.received_bytes += nbytes(buffers)
        return unpack(buffers)

    def _watch(self) -> None:
        """Sends again what a service that has been started anew did not answer.

        Updates have names, so that one that had been made is not made twice.
        """
        from zmq.utils.monitor import recv_monitor_message

        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            if event == self._zmq.EVENT_DISCONNECTED:
                self.lost_since = self.lost_since or time.monotonic()
            elif self.lost_since is not None:
                self.lost_since = None
                self.returns += 1
                for parts in self._waiting.values():
                    self._send(parts)

    def is_lost_for(self, seconds: float) -> bool:
        """Whether the service was there, and has been gone for so long."""
        since = self.lost_since
        return since is not None and time.monotonic() - since > seconds

    def close(self) -> None:
        """Ends the connection."""
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close()
        self._context.term()


def _send(socket: Any, parts: Sequence[Any]) -> None:
    import zmq

    last = len(parts) - 1
    for i, part in enumerate(parts):
        size = part.nbytes if isinstance(part, memoryview) else len(part)
        flags = zmq.SNDMORE if i < last else 0
        socket.send(part, flags, copy=size < _COPY_BYTES)


def serve(
    service: Service,
    handle: Callable[[Any], Any],
    until: Callable[[], bool],
    idle: Callable[[], None] = lambda: None,
    every: float = 0.2,
) -> None:
    """Answers requests one after the other until `until()`.

    Args:
        service: where they come in.
        handle: callable of a request that returns the reply. What it raises becomes
            the reply, and is raised where the request came from.
        until: callable, asked after each request.
        idle: callable, called at least every so many seconds.
        every: float, seconds.
    """
    due = time.monotonic() + every
    while not until():
        received = service.receive(max(0.0, due - time.monotonic()))
        if received is not None:
            sender, (number, message) = received
            service.send(sender, (number, answer(handle, message)))
        if time.monotonic() >= due:
            idle()
            due = time.monotonic() + every


def answer(handle: Callable[[Any], Any], message: Any) -> tuple[str, Any]:
    """What a request comes to: `("ok", reply)`, or `("error", exception)`."""
    try:
        return "ok", handle(message)
    except Exception as error:  # Whatever it is, it is raised where it was asked for.
        return "error", _portable(error)


def _portable(error: Exception) -> Exception:
    """An exception that arrives, with its traceback as a note."""
    import pickle
    import traceback

    text = "".join(traceback.format_exception(error))
    try:
        copy = pickle.loads(pickle.dumps(error))
    except Exception:  # Pickling runs the exception's own code: anything may fail.
        copy = PeerError(f"{type(error).__name__}: {error}")
    copy.add_note(f"Raised in another process:\n{text}")
    return copy  # type: ignore[no-any-return]


@contextlib.contextmanager
def connected(
    addresses: Sequence[str], keys: Keys | None, what: str
) -> Iterator[list[Connection]]:
    """Connections to several services, closed at the end."""
    connections = [
        Connection(address, keys, f"{what} {i}") for i, address in enumerate(addresses)
    ]
    try:
        yield connections
    finally:
        for connection in connections:
            connection.close()
