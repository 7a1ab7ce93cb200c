"""Client side of requests between processes, over ZeroMQ."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from keras_strategies.errors import ClusterTimeoutError, PeerError
from keras_strategies.parameter_server.wire.arrays.array_messages import (
    nbytes,
    pack,
    send,
    unpack,
)
from keras_strategies.parameter_server.wire.arrays.shared_buffers import (
    IS_AVAILABLE,
    SharedBuffers,
    is_shared,
)
from keras_strategies.parameter_server.wire.cluster_keys import Keys, needs_keys

#: Milliseconds for unsent messages of a closed socket.
LINGER_MS = 500
#: Seconds between calls of `check` while waiting for a reply.
_CHECK_SECONDS = 0.25


class Connection:
    """Connection to a service; for one thread.

    A request is repeated after a restart of the service; updates have names, so that
    each is applied once.

    Args:
        address: str, the service's; or a callable that returns the current address, or
            `""` before there is one: the connection follows its changes.
        keys: `Keys`, needed for TCP.
        peer: str, name of the service in errors, such as `"parameter server 0"`.
        check: called periodically while waiting; raises to end the wait.
    """

    def __init__(
        self,
        address: str | Callable[[], str],
        keys: Keys | None = None,
        peer: str = "the peer",
        check: Callable[[], None] | None = None,
    ):
        import zmq

        self._check = check
        self._find_address = address if callable(address) else None

        self._zmq = zmq
        self._keys = keys
        self.address = ""
        self.peer = peer
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = LINGER_MS
        self._socket.sndhwm = self._socket.rcvhwm = 0
        self._socket.reconnect_ivl = 20
        self._socket.reconnect_ivl_max = 500
        events = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED
        self._monitor = self._socket.get_monitor_socket(events)
        #: Time of the disconnection; None while connected or never connected.
        self.lost_since: float | None = None
        #: Number of reconnections.
        self.reconnects = 0
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self._numbers = itertools.count(1)
        self._replies: dict[int, Any] = {}
        # Unanswered requests, repeated after a reconnection.
        self._waiting: dict[int, list[Any]] = {}
        self.received_bytes = 0
        self.sent_bytes = 0
        first = address() if callable(address) else address
        can_share = first.startswith("ipc://") and IS_AVAILABLE
        self._shared_buffers = SharedBuffers(regions=3) if can_share else None
        self._turns = itertools.count(1)
        self._connect(first)

    def _connect(self, address: str) -> None:
        if not address:
            return
        if needs_keys(address):
            assert self._keys is not None, "TCP needs keys"
            self._socket.curve_serverkey = self._keys.service_public
            self._socket.curve_publickey = self._keys.client_public
            self._socket.curve_secretkey = self._keys.client_secret
        self.address = address
        self._socket.connect(address)

    def _follow(self) -> None:
        """Connects to the service's new address, if it has another one."""
        if self._find_address is None:
            return
        address = self._find_address()
        if not address or address == self.address:
            return
        if not self.address:
            self._connect(address)
            for parts in self._waiting.values():
                send(self._socket, parts)
            return
        # Requests are repeated when the new connection is established.
        self.lost_since = self.lost_since or time.monotonic()
        self._socket.disconnect(self.address)
        self._connect(address)

    def begin(self, message: Any, shares_memory: bool = False) -> int:
        """Sends a request without waiting; returns its number for `finish`.

        Args:
            message: any picklable object.
            shares_memory: bool, whether large arrays may be in shared memory: those of
                the reply must have been read when the request after the next one
                is sent.
        """
        self._follow()
        number = next(self._numbers)
        shares = shares_memory and self._shared_buffers is not None
        turn = next(self._turns) if shares else None
        parts = pack((number, message, turn))
        self.sent_bytes += nbytes(parts)
        if shares:
            assert self._shared_buffers is not None
            parts = self._shared_buffers.write(parts, number)
        self._waiting[number] = parts
        if self.address:
            send(self._socket, parts)
        return number

    def request(self, message: Any, timeout: float) -> Any:
        """Sends a request and waits for its reply (see `finish`)."""
        return self.finish(self.begin(message), timeout)

    def post(self, message: Any) -> None:
        """Sends a message that has no reply."""
        self._send(pack(message))

    def _send(self, parts: list[Any]) -> None:
        self.sent_bytes += nbytes(parts)
        send(self._socket, parts)

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
        is_checked = self._check is not None or self._find_address is not None
        while number not in self._replies:
            left = until - time.monotonic()
            wait = min(left, _CHECK_SECONDS) if is_checked else left
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
            raise value.error(PeerError)
        return value

    def receive(self, timeout: float) -> Any:
        """The next message; None after `timeout` seconds."""
        self._follow()
        ready = dict(self._poller.poll(max(0, int(timeout * 1000))))
        if self._monitor in ready:
            self._watch()
        if self._socket not in ready:
            return None
        frames = self._socket.recv_multipart(copy=False)
        buffers = [frame.buffer for frame in frames]
        if self._shared_buffers is not None and is_shared(buffers):
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
                    send(self._socket, parts)

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
