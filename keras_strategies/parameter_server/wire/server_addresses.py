"""Addresses of parameter servers, which change when one is restarted elsewhere."""

from __future__ import annotations

import threading
from collections.abc import Sequence


class ServerAddresses:
    """The current address of each parameter server; safe for threads.

    Servers report their addresses to the coordinator, and its replies to heartbeats
    report changes to the workers.

    Args:
        addresses: sequence of str, by server; `""` for one without an address yet.
    """

    def __init__(self, addresses: Sequence[str]):
        self._lock = threading.Lock()
        self._addresses = list(addresses)
        self._version = 0

    def __len__(self) -> int:
        return len(self._addresses)

    def __getitem__(self, server: int) -> str:
        """The address of a server; `""` before it is reported, or if it was removed."""
        with self._lock:
            return self._addresses[server] if server < len(self._addresses) else ""

    @property
    def version(self) -> int:
        """int, number of changes so far."""
        return self._version

    @property
    def state(self) -> tuple[int, list[str]]:
        """The number of changes, and all addresses."""
        with self._lock:
            return self._version, list(self._addresses)

    def set(self, server: int, address: str) -> None:
        """Sets the address of one server."""
        with self._lock:
            if self._addresses[server] != address:
                self._addresses[server] = address
                self._version += 1

    def replace(self, version: int, addresses: Sequence[str]) -> None:
        """Replaces all addresses by those of another process, see `state`."""
        with self._lock:
            self._version, self._addresses = version, list(addresses)
