"""Relay between JAX's coordination service and its clients.

# Purpose

Each client of JAX has one gRPC connection to the service in the chief's process, and
polls it for errors. When the connection breaks or the service ends, JAX 0.10 calls
`LOG(FATAL)`: the end of the chief would end all workers without an error message. (The
callback for this case cannot be a Python function: its argument has no conversion.)

So each client connects to a local relay, which keeps the client's connection open when
the service's connection closes. Lost workers are detected by the group's hub. The chief
has a second relay between the network and the service: it listens only on the interface
that the cluster configures, and closes before the service ends, so that the service's
last error reaches no client.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

_BYTES = 65536


class Relay:
    """Forwards the connections of a port, in both directions.

    Args:
        host: str, the address to listen at.
        target: opens a connection to the far end.
        keeps: bool, whether connections stay open when the far end closes.
    """

    def __init__(self, host: str, target: Callable[[], socket.socket], keeps: bool):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._server = socket.create_server((host, 0), family=family)
        #: int, the port that the relay listens at.
        self.port = int(self._server.getsockname()[1])
        self._target = target
        self._keeps = keeps
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._closed = False
        self._start(self._accept)

    def _start(self, target: Callable[..., None], *args: socket.socket) -> None:
        threading.Thread(
            target=target, args=args, name="jax-relay", daemon=True
        ).start()

    def close(self) -> None:
        """Closes all connections."""
        with self._lock:
            self._closed = True
            ends = [self._server, *self._open]
            self._open.clear()
        for end in ends:
            _end(end)

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._server.accept()
            except OSError:
                return
            self._start(self._connect, near)

    def _connect(self, near: socket.socket) -> None:
        try:
            far = self._target()
        except OSError:
            _end(near)
            return
        for end in (near, far):
            end.settimeout(None)  # The timeout was for connecting.
            if end.family != socket.AF_UNIX:
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._lock:
            if self._closed:
                _end(near)
                _end(far)
                return
            self._open |= {near, far}
        self._start(self._forward, near, far)
        self._start(self._back, far, near)

    def _forward(self, near: socket.socket, far: socket.socket) -> None:
        for data in _received(near):
            # Data for a closed far end are dropped.
            with contextlib.suppress(OSError):
                far.sendall(data)
        self._drop(near, far)

    def _back(self, far: socket.socket, near: socket.socket) -> None:
        with contextlib.suppress(OSError):
            for data in _received(far):
                near.sendall(data)
        if not self._keeps:
            self._drop(near, far)

    def _drop(self, *ends: socket.socket) -> None:
        with self._lock:
            self._open.difference_update(ends)
        for end in ends:
            _end(end)


def _received(end: socket.socket) -> Iterator[bytes]:
    while True:
        try:
            data = end.recv(_BYTES)
        except OSError:
            return
        if not data:
            return
        yield data


def _end(end: socket.socket) -> None:
    # Closing alone would not wake a thread that waits in this process.
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    end.close()
