"""Entry point of a parameter server's process."""

from __future__ import annotations

import math
import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path

from keras_strategies.errors import WorkerError
from keras_strategies.parameter_server.engines import parameter_server_engine
from keras_strategies.parameter_server.server.request_handler import ParameterServer
from keras_strategies.parameter_server.wire.cluster_keys import Keys
from keras_strategies.parameter_server.wire.heartbeat import start_heartbeats
from keras_strategies.parameter_server.wire.request_service import Service, serve


def run_server(
    index: int,
    incarnation: int,
    control: str,
    keys: Keys | None,
    address: str,
    snapshots: str | None,
    interval: float | None,
    coordinator_seconds: float = math.inf,
) -> None:
    """Runs a parameter server's process until the coordinator ends.

    Args:
        index: int, its number.
        incarnation: int, number of earlier processes of this server.
        control: str, the coordinator's address.
        keys: `Keys` where addresses are not local.
        address: str, the server's own; with port 0 for a free one.
        snapshots: folder for snapshots, None for none.
        interval: float, seconds between snapshots; None for snapshots on request only.
        coordinator_seconds: float, timeout for a lost coordinator.

    Raises:
        RuntimeError: `WorkerError` if the coordinator is lost for longer.
    """
    reasons: list[str] = []

    def ready(server: ParameterServer, found: str) -> None:
        restored = (server.is_restored, server.damage)
        value = (index, incarnation, os.getpid(), *restored, found)

        def lost(reason: str) -> None:
            reasons.append(reason)
            server.on_stop()

        start_heartbeats(
            control,
            keys,
            ("ps", index),
            incarnation,
            lambda: ("server", value),
            lost,
            coordinator_seconds,
            server.notices,
            measure=lambda: ("memory", (index, _resident_bytes())),
        )

    with parameter_server_engine().on_cpu():
        _serve(index, address, keys, snapshots, interval, ready)
    if reasons:
        raise WorkerError(reasons[0])


def _resident_bytes() -> int:
    """Bytes of this process in memory; the maximum so far where not on Linux."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        # KiB, but bytes on macOS.
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return pages * resource.getpagesize()


def _serve(
    index: int,
    address: str,
    keys: Keys | None,
    snapshots: str | None,
    interval: float | None,
    ready: Callable[[ParameterServer, str], None],
) -> None:
    """Serves requests until the server is stopped.

    Args:
        index: int, its number.
        address: str, the server's own.
        keys: `Keys` for TCP.
        snapshots: folder for snapshots, None for none.
        interval: float, seconds between snapshots; None for snapshots on request only.
        ready: called with the server and its address once it listens.
    """
    server = ParameterServer(index, snapshots, interval)
    service = Service(address, keys)
    try:
        ready(server, service.address)
        serve(
            service,
            server.handle,
            lambda: server.is_stopped,
            server.idle,
            server.idle_seconds,
        )
    finally:
        service.close()
