"""Sockets of engines in this process, to end waits for lost workers.

When a worker is lost, only its neighbours in the ring get an error, and none if its
process is stopped. Shutting down this process's sockets ends every wait with an error,
also in C++. Engines do not expose their sockets; they are found by the addresses of
their listeners: a connection of the engine has one of them at one of its ends. Workers
exchange the addresses before they connect, so other connections of the process, such
as those of a logger or a database, are never taken for the engine's.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from keras_strategies.cluster.group import WorkerGroup

T = TypeVar("T")
_Address = tuple[str, int]
# Seconds between two searches for connections of a group that is being created.
_INTERVAL = 0.05
# Repetitions of the creation of a listener while other threads create some too.
_ATTEMPTS = 20
# The state of a connection that its peer has not answered, in `/proc/net/tcp`.
_SYN_SENT = "02"


class EngineSockets:
    """The connections of an engine between the workers of a group.

    On systems without `/proc` no connections are found.

    Example:

    >>> sockets = EngineSockets()
    >>> device = sockets.listening(lambda: gloo_device(host))
    >>> with sockets.connecting(group):
    ...     engine = create_gloo_group(device, ...)
    >>> sockets.shutdown()  # On another thread, while the engine waits.
    """

    def __init__(self) -> None:
        self._addresses: set[_Address] = set()
        self._own: set[_Address] = set()
        self._is_connecting = False

    def add(self, host: str, port: int) -> None:
        """Adds the connections of a listener, such as that of a `TCPStore`."""
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        self._addresses |= {_address(each[4]) for each in found}

    def listening(self, create: Callable[[], T]) -> T:
        """The result of `create`, an object of the engine with one listener.

        It is created again if another thread of the process has begun to listen
        meanwhile, until the listener is the only new one.
        """
        for _ in range(_ATTEMPTS):
            before = _listeners()
            made = create()
            new = _listeners() - before
            if len(new) <= 1:
                self._own |= new
                break
        # Otherwise waits for a lost worker end after the engine's own timeout.
        return made

    @contextlib.contextmanager
    def connecting(self, group: WorkerGroup) -> Iterator[None]:
        """Context manager around the engine's connection of all workers.

        Raises:
            WorkerError: if a worker is lost.
        """
        own = sorted(self._own)
        found = group.gather_values("the addresses of Gloo", own)
        self._addresses |= {(host, port) for each in found for host, port in each}
        self._is_connecting = True
        try:
            # The loss of a worker before this point would not end the wait.
            group.check()
            yield
        finally:
            self._is_connecting = False

    def shutdown(self) -> int:
        """Shuts down all connections; calls that wait for them raise errors.

        While workers are being connected, a thread also shuts down connections that are
        made later, until that has ended.

        Returns:
            int, the number of connections.
        """
        if self._is_connecting:
            threading.Thread(target=self._end_connecting, daemon=True).start()
        return self._shutdown()

    def _end_connecting(self) -> None:
        while self._is_connecting:
            self._shutdown()
            time.sleep(_INTERVAL)

    def _shutdown(self) -> int:
        count = 0
        unanswered: dict[int, _Address] | None = None
        for each in _connections():
            with contextlib.suppress(OSError):
                peer: _Address | None
                try:
                    peer = _address(each.getpeername())
                except OSError:  # Not connected yet, or not any more.
                    if unanswered is None:
                        unanswered = _unanswered()
                    peer = unanswered.get(os.fstat(each.fileno()).st_ino)
                if self._addresses & {_address(each.getsockname()), peer}:
                    each.shutdown(socket.SHUT_RDWR)
                    count += 1
        return count


def _unanswered() -> dict[int, _Address]:
    """The peers of connections that have not been answered, by the socket's inode."""
    found = {}
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError), open(f"/proc/net/{name}") as table:
            for line in list(table)[1:]:
                # "0: 0100007F:1F90 0100007F:8AE2 02 ...", the inode is the tenth.
                parts = line.split()
                if parts[3] == _SYN_SENT:
                    found[int(parts[9])] = _parsed(parts[2])
    return found


def _parsed(text: str) -> _Address:
    """An address of `/proc/net/tcp`: words of 32 bits in the order of this machine."""
    words, port = text.split(":")
    numbers = [int(words[i : i + 8], 16) for i in range(0, len(words), 8)]
    family = socket.AF_INET if len(numbers) == 1 else socket.AF_INET6
    host = socket.inet_ntop(family, struct.pack(f"={len(numbers)}I", *numbers))
    return _address((host, int(port, 16)))


def _address(name: Any) -> _Address:
    # gRPC connects to IPv4 addresses as "::ffff:127.0.0.1".
    return str(name[0]).removeprefix("::ffff:"), int(name[1])


def _listeners() -> set[_Address]:
    """The addresses at which this process listens."""
    return {_address(each.getsockname()) for each in _sockets() if _is_listener(each)}


def _connections() -> Iterator[socket.socket]:
    return (each for each in _sockets() if not _is_listener(each))


def _is_listener(found: socket.socket) -> bool:
    return bool(found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _sockets() -> Iterator[socket.socket]:
    """Duplicates of this process's IPv4 and IPv6 sockets, each closed at the next."""
    try:
        numbers = os.listdir("/proc/self/fd")
    except OSError:
        return
    for number in numbers:
        try:
            own = os.dup(int(number))
        except OSError:  # Closed by another thread.
            continue
        try:
            found = socket.socket(fileno=own)
        except OSError:  # A file.
            os.close(own)
            continue
        with found:
            if found.family in (socket.AF_INET, socket.AF_INET6):
                yield found
