"""Reachability of the other tasks of a cluster.

While a doctor runs, it listens on the port that the cluster gives its task, so that
doctors on all machines can find each other before anything is trained. It sends a
greeting to each connection, and waits until every other doctor has connected.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from keras_strategies.cluster.own_address import own_address
from keras_strategies.cluster.spec import ClusterSpec, split_address
from keras_strategies.errors import ClusterError

_HELLO = b"keras-strategies doctor: "
# Time to wait for the greeting, which another program does not send.
_GREETING_SECONDS = 1.0
_RETRY_SECONDS = 0.1


@dataclass(frozen=True)
class Peer:
    """Result of a connection to one task.

    Args:
        task: str, such as `"worker 1"`.
        address: str.
        answers: bool, whether the expected task answers.
        found: str, description of the result.
        is_doctor: bool, whether a doctor answered.
    """

    task: str
    address: str
    answers: bool
    found: str
    is_doctor: bool = False


@dataclass
class Listener:
    """Listener on this task's port, and its visitors."""

    task: str
    problem: str = ""
    visitors: set[str] = field(default_factory=set)
    arrived: threading.Condition = field(default_factory=threading.Condition)

    def wait_for(self, tasks: set[str], timeout: float) -> bool:
        """Whether all these tasks have connected within `timeout` seconds."""
        with self.arrived:
            return self.arrived.wait_for(lambda: tasks <= self.visitors, timeout)

    def serve(self, server: socket.socket) -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:  # The doctor has closed it.
                return
            with contextlib.suppress(OSError), connection:
                connection.settimeout(_GREETING_SECONDS)
                connection.sendall(_HELLO + self.task.encode() + b"\n")
                visitor = _greeting(connection)
                if visitor:
                    with self.arrived:
                        self.visitors.add(visitor)
                        self.arrived.notify_all()


@contextlib.contextmanager
def listening(task: str, address: str) -> Iterator[Listener]:
    """Listens on a task's address; sets `problem` to the reason if it cannot."""
    listener = Listener(task)
    try:
        host, port = split_address(address)
        host = own_address(host)
        server = socket.create_server((host, port), family=_family(host, port))
    except (OSError, ClusterError) as error:
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            listener.problem = "another program uses the port already"
        else:
            listener.problem = _reason(error)
        yield listener
        return
    thread = threading.Thread(target=listener.serve, args=(server,), name="doctor")
    thread.start()
    try:
        yield listener
    finally:
        # Closing alone does not wake a thread that waits for a connection.
        with contextlib.suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)
        server.close()
        thread.join()


def _family(host: str, port: int) -> socket.AddressFamily:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return socket.AddressFamily(found[0][0])


def find_peers(spec: ClusterSpec, own: str, timeout: float) -> list[Peer]:
    """Connects to every other task of a cluster, to all at the same time.

    Args:
        spec: the cluster.
        own: str, this process's task, such as `"worker 0"`.
        timeout: float, seconds for all of it.

    Returns:
        list of `Peer`, in the cluster's order.
    """
    deadline = time.monotonic() + timeout
    addresses = {
        f"{job} {index}": spec.task_address(job, index)
        for job in spec.jobs
        for index in spec.task_indices(job)
    }
    addresses.pop(own, None)
    found: dict[str, Peer] = {}

    def look(task: str, address: str) -> None:
        found[task] = _probe(own, task, address, deadline)

    threads = [
        threading.Thread(target=look, args=item, name=f"peer {item[0]}")
        for item in addresses.items()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[task] for task in addresses]


def _probe(own: str, task: str, address: str, deadline: float) -> Peer:
    try:
        host, port = split_address(address)
    except ClusterError:
        return Peer(task, address, False, "the address is unknown on this machine")
    while True:
        left = deadline - time.monotonic()
        try:
            with socket.create_connection((host, port), max(left, 0.5)) as connection:
                return _exchange_greetings(own, task, address, connection)
        except OSError as error:
            name_is_unknown = isinstance(error, socket.gaierror)
            if name_is_unknown or left <= _RETRY_SECONDS:
                return Peer(task, address, False, _reason(error))
        time.sleep(_RETRY_SECONDS)


def _exchange_greetings(
    own: str, task: str, address: str, connection: socket.socket
) -> Peer:
    connection.settimeout(_GREETING_SECONDS)
    there = _greeting(connection)
    if not there:
        # No greeting is sent, which could disturb training in progress.
        return Peer(task, address, True, "answers (another program than a doctor)")
    connection.sendall(_HELLO + own.encode() + b"\n")
    if there != task:
        return Peer(task, address, False, f"the doctor of {there} answers", True)
    return Peer(task, address, True, "answers", True)


def _greeting(connection: socket.socket) -> str:
    """The task of the other doctor; empty for another program."""
    text = b""
    try:
        while not text.endswith(b"\n") and len(text) < 200:
            chunk = connection.recv(200)
            if not chunk:
                break
            text += chunk
    except OSError:
        return ""
    if not text.startswith(_HELLO):
        return ""
    return text.removeprefix(_HELLO).decode(errors="replace").strip()


def _reason(error: Exception) -> str:
    """Description of a failed connection."""
    if isinstance(error, ConnectionRefusedError):
        return "refused: the machine is up, but nothing listens on the port"
    if isinstance(error, TimeoutError):
        return "no answer: the machine is down, or a firewall drops the connection"
    if isinstance(error, socket.gaierror):
        return f"the machine's name cannot be resolved ({error.strerror})"
    if isinstance(error, OSError) and error.errno is not None:
        return os.strerror(error.errno)
    return str(error)
