"""Heartbeats: liveness of workers and servers, and detection of a lost coordinator.

Heartbeats are sent by a thread, so that they continue during a step that hangs; a
stopped process or a lost machine sends none. The coordinator replies with changed
addresses of servers, or with a request to end a process with a step that hangs.
"""

from __future__ import annotations

import collections
import math
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

from keras_strategies.parameter_server.wire.cluster_keys import Keys
from keras_strategies.parameter_server.wire.request_connection import Connection
from keras_strategies.parameter_server.wire.server_addresses import ServerAddresses

#: Seconds between heartbeats.
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
    addresses: ServerAddresses | None = None,
    measure: Callable[[], tuple[str, Any]] | None = None,
) -> None:
    """Sends heartbeats to the coordinator until the process ends.

    Args:
        address: str, the coordinator's.
        keys: `Keys` for TCP.
        index: int, the worker's number, or `("ps", number)`.
        incarnation: int, number of earlier processes with this index.
        announce: returns the message that registers the process, sent at first and
            after each reconnection.
        lost: called with an error message when the coordinator is lost.
        coordinator_seconds: float, timeout for a lost coordinator.
        notices: further messages for the coordinator, pairs of a kind and a value,
            appended by other threads.
        addresses: a worker's addresses of servers, which replies to heartbeats change.
        measure: returns a message to send with each heartbeat.
    """
    connection = Connection(address, keys, "the coordinator")
    reconnects = 0
    if announce is not None:
        connection.post((0, announce()))
    while True:
        version = None if addresses is None else addresses.version
        connection.post((0, ("heartbeat", (index, incarnation, version))))
        if measure is not None:
            connection.post((0, measure()))
        while notices:
            connection.post((0, notices.popleft()))
        # This also monitors the connection.
        message = connection.receive(HEARTBEAT_SECONDS)
        if message is not None:
            _, (kind, value) = message
            if kind == "end":
                print(f"This process ends: {value}.", file=sys.stderr, flush=True)
                # Its main thread hangs.
                os._exit(1)
            if kind == "addresses" and addresses is not None:
                addresses.replace(*value)
        if announce is not None and connection.reconnects > reconnects:
            reconnects = connection.reconnects
            connection.post((0, announce()))
        if lost is not None and connection.is_lost_for(coordinator_seconds):
            lost(coordinator_lost_message(connection, coordinator_seconds))
            connection.close()
            return


def start_heartbeats(*arguments: Any, **options: Any) -> None:
    """Starts `send_heartbeats` in a daemon thread."""
    threading.Thread(
        target=send_heartbeats, args=arguments, kwargs=options, daemon=True
    ).start()


def coordinator_lost_message(connection: Connection, seconds: float) -> str:
    """The error message for a lost coordinator."""
    return (
        f"The coordinator at {connection.address} was lost and did not return within "
        f"{seconds:g} seconds. Restart the tasks with a new coordinator, which resumes "
        "from a checkpoint. `coordinator_seconds` of ks.Server sets the timeout."
    )
