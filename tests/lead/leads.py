"""Leads in processes of their own, and clients in threads of this one."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from keras_strategies.lead.client import LeadClient
from keras_strategies.lead.process import BACKLOG, start_lead
from keras_strategies.lead.state import Settings

SECRET = b"the secret of the tests"


class RunningLead:
    """A lead, and the clients that tests have made; a context manager.

    Args:
        workers: int, workers of the cluster.
        stderr: a file for its errors.
        settings: of `Settings`.
    """

    def __init__(self, workers: int, stderr: Any = sys.stderr, **settings: Any):
        listener = socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)
        self.address = listener.getsockname()[:2]
        times = {"timeout": 3.0, "patience": 20.0}
        self.settings = Settings(workers, **(times | settings))
        self.process = start_lead(listener, self.settings, SECRET, stderr=stderr)
        self.clients: list[LeadClient] = []

    def __enter__(self) -> RunningLead:
        return self

    def __exit__(self, *error: object) -> None:
        for client in self.clients:
            client.abandon()
        self.process.kill()
        self.process.wait()

    def client(self, index: int, **options: Any) -> LeadClient:
        """A connected worker."""
        address = options.pop("address", self.address)
        secret = options.pop("secret", SECRET)
        client = LeadClient([address], secret, index, timeout=20.0, **options)
        self.clients.append(client)
        return client

    def training(self, count: int, **options: Any) -> list[LeadClient]:
        """Connected workers in their first generation, by rank."""
        found = together(range(count), lambda index: self.client(index, **options))
        together(found, begin)
        return sorted(found, key=lambda client: client.generation.rank)

    @property
    def threads(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/task"))

    @property
    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    @property
    def megabytes(self) -> float:
        with open(f"/proc/{self.process.pid}/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize() / 2**20


def begin(client: LeadClient, step: int | None = None) -> LeadClient:
    """The client has begun its next generation."""
    generation = client.next_generation(step)
    client.confirm(generation.step)
    return client


def compare(client: LeadClient, what: str, value: str = "") -> list[Any]:
    """The different values of all workers, with the ranks that have them."""
    return client.compared(client.offer(what, value))


def together(
    items: Any, call: Callable[[Any], Any], seconds: float = 30.0
) -> list[Any]:
    """The results of calls in a thread each, or their errors."""
    given = list(items)
    with ThreadPoolExecutor(len(given)) as pool:
        futures = [pool.submit(call, each) for each in given]
        return [each.exception(seconds) or each.result() for each in futures]


class Proxy:
    """A network between workers and the lead, which can be cut, or silent."""

    def __init__(self, address: tuple[str, int]):
        self._address = address
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._is_open = threading.Event()
        self._is_open.set()
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = self._server.getsockname()[:2]
        self._refuses = False
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._server.accept()
                if self._refuses:
                    near.close()
                    continue
                far = socket.create_connection(self._address, 5)
            except OSError:
                return
            for each in (near, far):
                each.settimeout(None)
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._pairs.append((near, far))
            for ends in ((near, far), (far, near)):
                threading.Thread(target=self._copy, args=ends, daemon=True).start()

    def _copy(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(1 << 16):
                self._is_open.wait()
                target.sendall(data)
        except OSError:
            pass
        self._end([(source, target)])

    def _end(self, pairs: list[tuple[socket.socket, socket.socket]]) -> None:
        for pair in pairs:
            for each in pair:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

    def cut(self, *, refuses: bool = False) -> None:
        """Ends all connections; later ones too if it `refuses` them."""
        self._refuses = refuses
        pairs, self._pairs = self._pairs, []
        self._end(pairs)

    def silence(self) -> None:
        """Holds all data back."""
        self._is_open.clear()

    def mend(self) -> None:
        """Takes part again."""
        self._refuses = False
        self._is_open.set()

    def close(self) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self.mend()
        self.cut()
        self._thread.join(5)


def lead_process(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """The result of Python code in a process."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **variables}
    return subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
