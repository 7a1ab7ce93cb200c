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
BEAT_SECONDS = 0.5


def beat(
    address: str,
    keys: Keys | None,
    index: Any,
    incarnation: int,
    announce: Callable[[], tuple[str, Any]] | None = None,
    lost: Callable[[str], None] | None = None,
    patience: float = math.inf,
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
    returns = 0
    if announce is not None:
        connection.post((0, announce()))
    while True:
        connection.post((0, ("beat", (index, incarnation))))
        while notices:
            connection.post((0, notices.popleft()))
        # Nobody answers; this looks after the connection.
        connection.receive(BEAT_SECONDS)
        if announce is not None and connection.returns > returns:
            returns = connection.returns
            connection.post((0, announce()))
        if lost is not None and connection.is_lost_for(patience):
            lost(coordinator_lost(connection, patience))
            connection.close()
            return


def start_beating(*arguments: Any) -> None:
    """Begins `beat` in a thread that ends with the process."""
    threading.Thread(target=beat, args=arguments, daemon=True).start()


def coordinator_lost(connection: Connection, patience: float) -> str:
    """What there is to say when the coordinator does not come back."""
    return (
        f"The coordinator at {connection.address} is gone, and has not come back "
        f"within {patience:g} seconds. Start the tasks again with a new coordinator, "
        "which goes on from a checkpoint; `coordinator_seconds` of ks.Server changes "
        "the wait."
    )
