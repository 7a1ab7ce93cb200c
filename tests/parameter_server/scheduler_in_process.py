"""A scheduler without processes: a test sends their messages and reports their ends."""

from __future__ import annotations

import queue

from keras_strategies.parameter_server.coordinator.cluster_options import ClusterOptions
from keras_strategies.parameter_server.coordinator.scheduler import Scheduler
from keras_strategies.parameter_server.variables.coordinator_variables import (
    CoordinatorVariables,
)
from keras_strategies.parameter_server.wire.server_addresses import ServerAddresses
from keras_strategies.parameter_server.wire.task_messages import FunctionDefinition
from parameter_server import clusters


class Messages:
    """Stands in for `Service`: messages of a test, and those to workers."""

    def __init__(self) -> None:
        self.received: queue.Queue = queue.Queue()
        self.sent: list[tuple[bytes, str]] = []

    def receive(self, timeout: float):
        try:
            return self.received.get(timeout=min(timeout, 0.02))
        except queue.Empty:
            return None

    def send(self, receiver: bytes, message) -> None:
        self.sent.append((receiver, message[1][0]))

    def wake(self) -> None:
        pass

    def put(self, sender: bytes, kind: str, value) -> None:
        self.received.put((sender, (0, (kind, value))))


def scheduler_of(messages, processes, can_restore=False, **options):
    """A scheduler of a worker and a server that are ready, and of one function."""
    scheduler = Scheduler(
        messages,
        ClusterOptions(1, 1, silence_seconds=1000.0, **options),
        processes,
        CoordinatorVariables(),
        can_restore=can_restore,
        name="me",
        addresses=ServerAddresses(["ipc://ps"]),
    )
    scheduler.define(FunctionDefinition(0, "call", b"", 0, (), "function 'step'"))
    messages.put(b"ps", "server", (0, 0, 60, False, "", "ipc://ps"))
    messages.put(b"w0", "worker", (0, 0, 50, "cpu:0"))
    scheduler.wait_ready(clusters.SECONDS)
    return scheduler
