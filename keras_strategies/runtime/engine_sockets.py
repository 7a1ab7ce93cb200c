"""Sockets of engines in this process, to end waits for lost workers.

When a worker is lost, only its neighbours in the ring get an error, and none if its
process is stopped. Shutting down this process's sockets ends every wait with an error,
also in C++. Engines do not expose their sockets; they are found by the addresses of
their listeners. Gloo's listeners are those that are new after its group is created.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from keras_strategies.cluster.group import WorkerGroup

_Address = tuple[str, int]
# Seconds between two searches for connections of a group that is being created.
_INTERVAL = 0.05


class EngineSockets:
    """The connections of an engine between the workers of a group.

    On systems without `/proc` no connections are found.

    Example:

    >>> sockets = EngineSockets()
    >>> with sockets.making(group):
    ...     engine = create_gloo_group(...)
    >>> sockets.shutdown()  # On another thread, while the engine waits.
    """

    def __init__(self) -> None:
        self._addresses: set[_Address] = set()
        # Listeners before the next group is created.
        self._before: frozenset[_Address] | None = None
        # Connections before it; None while no group is being created.
        self._known: frozenset[tuple[_Address, _Address | None]] | None = None

    def add(self, host: str, port: int) -> None:
        """Adds the connections of a listener, such as that of a `TCPStore`."""
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        self._addresses |= {_address(each[4]) for each in found}

    def expect(self) -> None:
        """Assigns listeners created from now on to the next group."""
        self._before = frozenset(_listeners())

    @contextlib.contextmanager
    def making(self, group: WorkerGroup) -> Iterator[None]:
        """Context manager around the creation of Gloo's group on all workers.

        Raises:
            WorkerError: if a worker is lost.
        """
        if self._before is None:
            self.expect()
        self._known = frozenset(map(_ends, _connections()))
        try:
            # The loss of a worker before this point would not end the wait.
            group.check()
            yield
        finally:
            self._known = None
            before, self._before = self._before or frozenset(), None
        own = sorted(_listeners() - before)
        found = group.gather_values("the addresses of Gloo", own)
        self._addresses |= {(host, port) for each in found for host, port in each}

    def shutdown(self) -> int:
        """Shuts down all connections; calls that wait for them raise errors.

        A thread also shuts down connections of a group that is being created, until
        its creation has ended.

        Returns:
            int, the number of connections.
        """
        if self._known is not None:
            threading.Thread(target=self._end_making, daemon=True).start()
        count = 0
        for each in _connections():
            with contextlib.suppress(OSError):
                if self._addresses & {_address(each.getsockname()), _peer(each)}:
                    each.shutdown(socket.SHUT_RDWR)
                    count += 1
        return count

    def _end_making(self) -> None:
        while (known := self._known) is not None:
            for each in _connections():
                ends = _ends(each)
                # Not connections accepted at other listeners of the process.
                if ends in known or ends[0] in (self._before or ()):
                    continue
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
            time.sleep(_INTERVAL)


def _ends(connection: socket.socket) -> tuple[_Address, _Address | None]:
    """Both addresses of a connection; None for the peer while it is connecting."""
    try:
        return _address(connection.getsockname()), _peer(connection)
    except OSError:
        return _address(connection.getsockname()), None


def _address(name: Any) -> _Address:
    # gRPC connects to IPv4 addresses as "::ffff:127.0.0.1".
    return str(name[0]).removeprefix("::ffff:"), int(name[1])


def _peer(connection: socket.socket) -> _Address:
    return _address(connection.getpeername())


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
