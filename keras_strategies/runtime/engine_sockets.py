"""Connections of engines in this process, and the end of waits in them.

Only the neighbours of a lost worker in the ring notice that its process has ended, and
none notices that it has stopped. `shutdown` of the process's own sockets ends every
wait, in C++ too, with an error. Engines do not name their sockets: they are those at
the addresses of their listeners. Gloo's are new when a group has been made.
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
# Seconds between two searches for connections of a group that is being made.
_INTERVAL = 0.05


class EngineSockets:
    """The connections of an engine between the workers of a group.

    On systems without `/proc` there are none to be found.

    Example:

    >>> sockets = EngineSockets()
    >>> with sockets.making(group):
    ...     engine = create_gloo_group(...)
    >>> sockets.shutdown()  # On another thread, while the engine waits.
    """

    def __init__(self) -> None:
        self._addresses: set[_Address] = set()
        # Listeners before the next group is made.
        self._before: frozenset[_Address] | None = None
        # Connections before it; None while none is made.
        self._known: frozenset[tuple[_Address, _Address | None]] | None = None

    def add(self, host: str, port: int) -> None:
        """Adds the connections of a listener, such as that of a store of addresses."""
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        self._addresses |= {_address(each[4]) for each in found}

    def expect(self) -> None:
        """Counts listeners from now on as the next group's, which may be made later."""
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
            # A worker that was lost earlier will end no wait.
            group.check()
            yield
        finally:
            self._known = None
            before, self._before = self._before or frozenset(), None
        own = sorted(_listeners() - before)
        found = group.gather_values("the addresses of Gloo", own)
        self._addresses |= {(host, port) for each in found for host, port in each}

    def shutdown(self) -> int:
        """Ends all connections, and the calls that wait for them with an error.

        The creation of a group ends as well, on a thread that searches until it has.

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
                # Not those that the process has accepted at its other listeners.
                if ends in known or ends[0] in (self._before or ()):
                    continue
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
            time.sleep(_INTERVAL)


def _ends(connection: socket.socket) -> tuple[_Address, _Address | None]:
    """Both addresses of a connection; None for that of one that is being made."""
    try:
        return _address(connection.getsockname()), _peer(connection)
    except OSError:
        return _address(connection.getsockname()), None


def _address(name: Any) -> _Address:
    # gRPC has connections to "::ffff:127.0.0.1".
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
    """Duplicates of this process's sockets of IPv4 and IPv6, open until the next."""
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
