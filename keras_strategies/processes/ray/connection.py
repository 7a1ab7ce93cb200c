"""Connection of this process to a Ray cluster that is running."""

from __future__ import annotations

import importlib
import os
import socket
from typing import Any

from keras_strategies.cluster.spec import split_address
from keras_strategies.errors import ClusterError

#: Address of the cluster for Ray's own commands and `ray.init`.
ADDRESS = "RAY_ADDRESS"
# Ray retries for a minute, and writes the reason to a log file only.
_CONNECT_SECONDS = 10.0


def import_ray() -> Any:
    """The module `ray`.

    Raises:
        ImportError: if it is not installed.
    """
    try:
        return importlib.import_module("ray")
    except ImportError:
        raise ImportError(
            "RayClusterResolver needs ray, which is not installed. Run "
            '`pip install "keras-strategies[ray]"`, on all nodes of the cluster.'
        ) from None


def connect(address: str | None = None) -> Any:
    """Connects this process as a driver, unless it is connected.

    Args:
        address: str, `"host:6379"`; None for that of the environment variable
            `RAY_ADDRESS`, else for the cluster of this machine.

    Returns:
        The module `ray`.

    Raises:
        ClusterError: if there is no cluster.
        ImportError: without ray.
    """
    ray = import_ray()
    if ray.is_initialized():
        return ray
    given = address or os.environ.get(ADDRESS) or "auto"
    if given.startswith("ray://"):
        raise ClusterError(
            f"The driver of {given!r} is outside of the cluster, where its workers "
            "cannot reach it. Run the script on a machine of the cluster, or submit it "
            "there with `ray job submit`."
        )
    try:
        if given != "auto":
            socket.create_connection(split_address(given), _CONNECT_SECONDS).close()
        ray.init(given, logging_level="WARNING", configure_logging=False)
    except (OSError, RuntimeError) as error:
        where = "on this machine" if given == "auto" else f"at {given!r}"
        why = str(error).rstrip(".")
        raise ClusterError(
            f"No Ray cluster was found {where}: {why}. Start one with `ray start "
            "--head`, add machines with `ray start --address=HOST:6379`, and pass that "
            f"address or set {ADDRESS}."
        ) from error
    return ray


def node_host() -> str:
    """str, the address of this node, as other nodes reach it."""
    return str(import_ray().util.get_node_ip_address())


def node_address(port: int) -> str:
    """str, the address of this node with a port, as other nodes reach it."""
    host = node_host()
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
