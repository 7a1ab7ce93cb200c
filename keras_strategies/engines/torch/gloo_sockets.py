"""Sockets of Gloo in this process, whose shutdown ends every wait in a collective.

`ProcessGroupGloo.abort` does not end the wait for a stopped process, and only
neighbours of a ring see that one has ended (decision 054).
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

_FAMILIES = (socket.AF_INET, socket.AF_INET6)


def listening_ports() -> set[int]:
    """The ports of all listening TCP sockets of this process."""
    return {
        int(each.getsockname()[1])
        for each in _sockets()
        if _is_tcp(each) and _listens(each)
    }


def shut_down(ports: set[int]) -> None:
    """Shuts down all connections from or to these ports."""
    for each in _sockets():
        if not _is_tcp(each) or _listens(each):
            continue
        with contextlib.suppress(OSError):
            if each.getsockname()[1] in ports or each.getpeername()[1] in ports:
                each.shutdown(socket.SHUT_RDWR)


def _is_tcp(each: socket.socket) -> bool:
    return each.family in _FAMILIES and each.type == socket.SOCK_STREAM


def _listens(each: socket.socket) -> bool:
    return bool(each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _sockets() -> Iterator[socket.socket]:
    """Duplicates of all sockets of this process, each closed after its use."""
    for name in os.listdir("/proc/self/fd"):
        try:
            number = os.dup(int(name))
        except OSError:
            continue
        try:
            found = socket.socket(fileno=number)
        except OSError:
            os.close(number)
            continue
        with found:
            yield found
