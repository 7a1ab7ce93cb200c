"""A relay between JAX's coordination service and its clients.

# Why there is one

JAX's clients and its service, in the chief's process, are one gRPC connection each, on
which a client always waits to be told of errors. When that connection breaks or the
service ends, JAX 0.10 calls `LOG(FATAL)`, which ends the process: with the chief, all
the others would die without an error that says what happened. (The callback that could
be given instead cannot be called from Python: its argument has no conversion.)

So each worker talks to a relay of its own, which does not tell it when the far end is
gone. Who is lost, and when, is for the group's hub to say. The chief has a relay in
front of the service too: on the one interface that the cluster names, and cut before
the service ends, so that its last words reach nobody.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

_BYTES = 65536


class Relay:
    """Passes on what comes on a port, in both directions.

    Args:
        host: str, the address to listen at.
        target: makes a connection to what is behind.
        keeps: bool, whether connections stay open when the far end has ended.
    """

    def __init__(self, host: str, target: Callable[[], socket.socket], keeps: bool):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._server = socket.create_server((host, 0), family=family)
        #: int, the port that it listens at.
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
        """Ends all connections at once."""
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
            end.settimeout(None)  # That of the connecting is not that of silence.
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
            # What is said to an end that is gone is lost, as on a broken line.
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
