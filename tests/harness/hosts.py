"""Hosts of their own on one machine: network namespaces at a virtual switch."""

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
    """Hosts, each with a cable to one switch.

    Names are those of network namespaces; the last one is the switch's.
    """

    names: tuple[str, ...]
    addresses: tuple[str, ...]

    def enter(self, host: int) -> str:
        """A line of Python that moves the process that runs it to a host."""
        path = f"/var/run/netns/{self.names[host]}"
        return f"import harness.hosts; harness.hosts.enter({path!r})"

    def cut(self, host: int) -> None:
        """Cuts the cable of a host: what is sent disappears, without an error."""
        _ip("-n", self.names[-1], "link", "set", f"port{host}", "down")

    def plug(self, host: int) -> None:
        """Plugs the cable of a host in again."""
        _ip("-n", self.names[-1], "link", "set", f"port{host}", "up")


@contextlib.contextmanager
def connected_hosts(count: int) -> Iterator[Hosts]:
    """Hosts, which are gone at the end with all that is on their network.

    A test is skipped where its process may not make namespaces.
    """
    names = tuple(f"ks-{os.getpid()}-{i}" for i in range(count + 1))
    hosts = Hosts(names, tuple(f"10.83.71.{i + 1}" for i in range(count)))
    try:
        try:
            _connect(hosts)
        except NotPermittedError as error:
            # Scripts that enter a host import this file without it.
            import pytest

            pytest.skip(f"no network namespaces here: {error}")
        yield hosts
    finally:
        if shutil.which("ip") is not None:
            for name in names:
                # It may not exist, if making it was what failed.
                subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def _connect(hosts: Hosts) -> None:
    """Makes the namespaces of hosts, and the cables from a switch to each."""
    names, switch = hosts.names, hosts.names[-1]
    for name in names:
        _ip("netns", "add", name)
    _ip("-n", switch, "link", "add", "switch", "type", "bridge")
    _ip("-n", switch, "link", "set", "switch", "up")
    for i, (name, address) in enumerate(zip(names, hosts.addresses, strict=False)):
        # Both ends are made where they belong, never on the machine's own network.
        peer = ("peer", "name", f"port{i}", "netns", switch)
        _ip("-n", name, "link", "add", "cable", "type", "veth", *peer)
        _ip("-n", switch, "link", "set", f"port{i}", "master", "switch")
        _ip("-n", switch, "link", "set", f"port{i}", "up")
        _ip("-n", name, "address", "add", f"{address}/24", "dev", "cable")
        for device in ("lo", "cable"):
            _ip("-n", name, "link", "set", device, "up")


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
