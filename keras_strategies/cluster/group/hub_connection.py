"""Connection of a worker to the hub, and the chief's server for it."""

from __future__ import annotations

import errno
import socket
import time
from typing import Any

from keras_strategies.cluster.group.group_messages import MessageConnection, server_at
from keras_strategies.cluster.own_address import own_address
from keras_strategies.errors import ClusterError, WorkerError


def listen(host: str, ports: list[int]) -> socket.socket:
    """A listening socket at the first free port."""
    problem: OSError | None = None
    own = own_address(host)
    for port in ports:
        try:
            return server_at(own, port)
        except OSError as error:
            problem = error
            if error.errno != errno.EADDRINUSE:
                break
    assert problem is not None
    where = f"{host}:{ports[0]}"
    if problem.errno == errno.EADDRINUSE:
        what = (
            "another program listens there, possibly an earlier run. End it, or use "
            "another port in the cluster's description"
        )
    else:
        what = (
            f"{problem.strerror or problem}. This process is the chief, so the first "
            "address of the cluster must be an address of this machine"
        )
    raise ClusterError(f"The chief cannot listen at {where}: {what}.") from problem


def connect(
    host: str, ports: list[int], hello: dict[str, Any], timeout: float
) -> tuple[MessageConnection, list[dict[str, Any]]]:
    """Connects to the hub and waits for all workers."""
    until = time.monotonic() + timeout
    problem = "nothing listens there"
    while time.monotonic() < until:
        for port in ports:
            try:
                connected = socket.create_connection((host, port), timeout=5)
                connection = MessageConnection(connected)
            except OSError as error:
                problem = error.strerror or str(error)
                continue
            connection.send(hello)
            try:
                # The hub has its own deadline, and reports missing workers.
                answer = _answer(connection, until + 5)
            except EOFError:
                problem = "the program that listens there is not a chief"
            else:
                if answer.get("kind") == "welcome":
                    return connection, answer["members"]
                if answer.get("kind") == "refused":
                    connection.close()
                    raise (WorkerError if answer["is_late"] else ClusterError)(
                        answer["why"]
                    )
                problem = "the chief there is of another cluster"
            connection.close()
        time.sleep(0.1)
    raise WorkerError(
        f"Worker {hello['index']} could not reach the chief at {host}:{ports[0]} for "
        f"{timeout:g} s: {problem}. Check that the chief was started, that the first "
        "address of the cluster is correct, and that no firewall blocks this "
        "machine. `CommunicationOptions(timeout_seconds=...)` sets this timeout."
    )


def _answer(connection: MessageConnection, until: float) -> dict[str, Any]:
    while (left := until - time.monotonic()) > 0:
        received = connection.receive(left)
        if received is not None and received[0].get("kind") != "beat":
            return received[0]
    raise EOFError("no answer")
