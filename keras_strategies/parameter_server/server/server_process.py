"""Entry point of a parameter server's process."""

from __future__ import annotations

import math
import os
from collections.abc import Callable

from keras_strategies.errors import WorkerError
from keras_strategies.parameter_server.server.request_handler import ParameterServer
from keras_strategies.parameter_server.wire.heartbeat import start_heartbeats
from keras_strategies.parameter_server.wire.transport import Keys, Service, serve


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
    """A parameter server's process.

    Args:
        index: int, its number.
        incarnation: int, counts the processes that have been this server.
        control: str, the coordinator's address.
        keys: `Keys` where addresses are not local.
        address: str, where it listens.
        snapshots: folder for snapshots, None for none.
        interval: float, seconds between snapshots; None for none by itself.
        patience: float, seconds that the coordinator may be gone.

    Raises:
        RuntimeError: `WorkerError` if the coordinator is gone for longer.
    """
    reasons: list[str] = []

    def ready(server: ParameterServer) -> None:
        restored = (server.is_restored, server.damage)
        value = (index, incarnation, os.getpid(), *restored)

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
        )

    _serve(index, address, keys, snapshots, interval, ready)
    if reasons:
        raise WorkerError(reasons[0])


def _serve(
    index: int,
    address: str,
    keys: Keys | None,
    snapshots: str | None,
    interval: float | None,
    ready: Callable[[ParameterServer], None],
) -> None:
    """Runs a parameter server until it is told to stop.

    Args:
        index: int, its number.
        address: str, where it listens.
        keys: `Keys` for TCP.
        snapshots: folder for snapshots, None for none.
        interval: float, seconds between snapshots; None for none by itself.
        ready: called with the server when it listens.
    """
    server = ParameterServer(index, snapshots, interval)
    service = Service(address, keys)
    try:
        ready(server)
        serve(
            service,
            server.handle,
            lambda: server.is_stopped,
            server.idle,
            server.idle_seconds,
        )
    finally:
        service.close()
