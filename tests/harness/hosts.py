"""Hosts of their own on one machine: network namespaces joined by a virtual cable."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass


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

    def command(self, host: int, *command: str) -> list[str]:
        """The command line that runs a command on a host."""
        return ["ip", "netns", "exec", self.names[host], *command]

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


def _ip(*arguments: str) -> None:
    tried = " ".join(["ip", *arguments])
    if shutil.which("ip") is None:
        raise NotPermittedError(f"`{tried}`: there is no command `ip` (iproute2)")
    process = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if process.returncode:
        raise NotPermittedError(f"`{tried}`: {process.stderr.strip()}")
