"""Hosts of their own on one machine: network namespaces joined by a virtual cable."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

_CLONE_NEWNET = 0x40000000


class NotPermittedError(Exception):
    """Namespaces cannot be made here; the message says what was tried."""


@dataclass(frozen=True)
class Hosts:
    """Two hosts, each with one end of a cable.

    Args:
        names: the names of their network namespaces.
        addresses: their addresses on the cable.
    """

    names: tuple[str, str]
    addresses: tuple[str, str]

    def enter(self, host: int) -> str:
        """A line of Python that moves the process that runs it to a host."""
        path = f"/var/run/netns/{self.names[host]}"
        return f"import harness.hosts; harness.hosts.enter({path!r})"

    def cut(self) -> None:
        """Cuts the cable: what is sent disappears, and nobody is told."""
        _ip("-n", self.names[0], "link", "set", "cable", "down")


@contextlib.contextmanager
def two_hosts() -> Iterator[Hosts]:
    """Two hosts, which are gone at the end with all that is on their network.

    Raises:
        NotPermittedError: where this process may not make namespaces.
    """
    names = (f"ks-{os.getpid()}-a", f"ks-{os.getpid()}-b")
    hosts = Hosts(names, ("10.83.71.1", "10.83.71.2"))
    try:
        for name in names:
            _ip("netns", "add", name)
        # Both ends are made where they belong, and never on the machine's own network.
        peer = ("peer", "name", "cable", "netns", names[1])
        _ip("-n", names[0], "link", "add", "cable", "type", "veth", *peer)
        for name, address in zip(names, hosts.addresses, strict=True):
            _ip("-n", name, "address", "add", f"{address}/24", "dev", "cable")
            for device in ("lo", "cable"):
                _ip("-n", name, "link", "set", device, "up")
        yield hosts
    finally:
        if shutil.which("ip") is not None:
            for name in names:
                # It may not exist, if making it was what failed.
                subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def enter(namespace: str) -> None:
    """Moves this process, of one thread, to a network namespace."""
    file = os.open(namespace, os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(file, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"no way into {namespace}")
    finally:
        os.close(file)


def _ip(*arguments: str) -> None:
    tried = " ".join(["ip", *arguments])
    if shutil.which("ip") is None:
        raise NotPermittedError(f"`{tried}`: there is no command `ip` (iproute2)")
    process = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if process.returncode:
        raise NotPermittedError(f"`{tried}`: {process.stderr.strip()}")
