"""Clusters of processes on this machine."""

from __future__ import annotations

import contextlib
import socket

from keras_strategies.cluster.resolver import ClusterResolver
from keras_strategies.cluster.spec import ClusterSpec
from keras_strategies.errors import ClusterError

LOOPBACK = "127.0.0.1"


def free_addresses(count: int) -> list[str]:
    """Free addresses on this machine's loopback.

    Args:
        count: int.

    Returns:
        list of str, all different. They are not reserved.
    """
    with contextlib.ExitStack() as stack:
        # All at once, so that no port is found twice.
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((LOOPBACK, 0))
        return [f"{LOOPBACK}:{each.getsockname()[1]}" for each in sockets]


class LocalClusterResolver(ClusterResolver):
    """A cluster on this machine, whose processes the strategy starts.

    This process is its chief. Addresses are on the loopback only.

    Args:
        workers: int, at least 1.
        ps: int, parameter servers.

    Raises:
        ValueError: for invalid numbers.

    Example:

    >>> resolver = ks.cluster_resolver.LocalClusterResolver(workers=4, ps=2)
    """

    _environment = "local"

    def __init__(self, workers: int = 2, ps: int = 1):
        if workers < 1 or ps < 0:
            raise ClusterError(
                "A local cluster needs at least one worker and zero or more "
                f"parameter servers. Received: workers={workers}, ps={ps}."
            )
        addresses = free_addresses(1 + workers + ps)
        cluster = {"chief": addresses[:1], "worker": addresses[1 : 1 + workers]}
        if ps:
            cluster["ps"] = addresses[1 + workers :]
        self._spec = ClusterSpec(cluster)
        super().__init__("chief", 0)

    def cluster_spec(self) -> ClusterSpec:
        return self._spec
