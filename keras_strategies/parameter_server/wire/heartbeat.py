"""Signs of life: how workers and servers say that they are there, and look for theirs.

A process that hangs in a step goes on beating, from a thread; one that is stopped or
whose machine is gone does not.
"""

from __future__ import annotations

import collections
import math
import threading
from collections.abc import Callable
from typing import Any

from keras_strategies.parameter_server.wire.transport import Connection, Keys

#: Seconds between signs of life.
HEARTBEAT_SECONDS = 0.5


def send_heartbeats(
    address: str,
    keys: Keys | None,
    index: Any,
    incarnation: int,
    announce: Callable[[], tuple[str, Any]] | None = None,
    lost: Callable[[str], None] | None = None,
    coordinator_seconds: float = math.inf,
    notices: collections.deque[tuple[str, Any]] | None = None,
) -> None:
    """Tells the coordinator that this process lives, until it ends.

    Args:
        address: str, the coordinator's.
        keys: `Keys` for TCP.
        index: int, the worker's number, or `("ps", number)`.
        incarnation: int, counts the processes with this number.
        announce: makes what the coordinator is told first, and when it has come back.
        lost: called with the reason once the coordinator is gone for too long.
        patience: float, seconds that it may be gone.
        notices: messages for the coordinator, pairs of a kind and a value, to which
            other threads append.
    """
    connection = Connection(address, keys, "the coordinator")
    reconnects = 0
    if announce is not None:
        connection.post((0, announce()))
    while True:
        connection.post((0, ("heartbeat", (index, incarnation))))
        while notices:
            connection.post((0, notices.popleft()))
        # Nobody answers; this looks after the connection.
        connection.receive(HEARTBEAT_SECONDS)
        if announce is not None and connection.reconnects > reconnects:
            reconnects = connection.reconnects
            connection.post((0, announce()))
        if lost is not None and connection.is_lost_for(coordinator_seconds):
            lost(coordinator_lost_message(connection, coordinator_seconds))
            connection.close()
            return


def start_heartbeats(*arguments: Any) -> None:
    """Begins `send_heartbeats` in a thread that ends with the process."""
    threading.Thread(target=send_heartbeats, args=arguments, daemon=True).start()


def coordinator_lost_message(connection: Connection, seconds: float) -> str:
    """The error message for a lost coordinator."""
    return (
        f"The coordinator at {connection.address} was lost and did not return within "
        f"{seconds:g} seconds. Restart the tasks with a new coordinator, which resumes "
        "from a checkpoint. `coordinator_seconds` of ks.Server sets the timeout."
    )
