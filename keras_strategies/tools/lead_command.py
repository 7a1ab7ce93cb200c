"""`keras-strategies lead`: the lead of a cluster in a process of its own."""

from __future__ import annotations

import dataclasses
import socket

from keras_strategies.errors import ClusterError
from keras_strategies.lead import process
from keras_strategies.lead.state import Settings


def lead_command(workers: int, port: int) -> int:
    """Runs the lead of a cluster; returns its exit code.

    Args:
        workers: int, the largest number of workers.
        port: int, at all addresses of this machine.

    Raises:
        ClusterError: if it cannot listen, or may open too few files.
    """
    process.needed_descriptors(workers)
    try:
        listener = socket.create_server(("", port), backlog=process.BACKLOG)
    except OSError as error:
        raise ClusterError(
            f"The lead cannot listen at port {port}: {error.strerror}."
        ) from error
    settings = dataclasses.asdict(Settings(workers))
    given = {"listener": listener.detach(), "settings": settings}
    return process.main({**given, "job": "", "starter": 0})
