"""Clusters of processes on this machine."""

from __future__ import annotations

import contextlib
import errno
import random
import socket

from keras_strategies.cluster.resolver import FixedClusterResolver
from keras_strategies.cluster.spec import ClusterSpec
from keras_strategies.types import check_count

LOOPBACK = "127.0.0.1"
#: Below the ports that Linux, macOS and Windows choose by default, and below those of
#: Kubernetes services.
PORTS = range(20_000, 30_000)


def free_addresses(count: int) -> list[str]:
    """Free addresses on this machine's loopback.

    Their ports are not among those that the system chooses for connections and for
    servers without a port, so that another program rarely takes one before its use.

    Args:
        count: int.

    Returns:
        list of str, all different. They are not reserved.
    """
    # Forked processes share the state of the generator with a seed.
    ports = random.SystemRandom().sample(PORTS, len(PORTS))
    with contextlib.ExitStack() as stack:
        found: list[str] = []
        while len(found) < count:
            # All at once, so that no port is found twice.
            each = stack.enter_context(socket.socket())
            # Where all of them are in use, any port.
            port = ports.pop() if ports else 0
            try:
                each.bind((LOOPBACK, port))
            except OSError as error:
                if not port or error.errno not in (errno.EADDRINUSE, errno.EACCES):
                    raise
                continue
            found.append(f"{LOOPBACK}:{each.getsockname()[1]}")
        return found


class LocalClusterResolver(FixedClusterResolver):
    """A cluster on this machine; the strategy starts its processes.

    This process is the chief. Addresses are on the loopback only.

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
        check_count("workers", workers, 1)
        check_count("ps", ps, 0)
        addresses = free_addresses(1 + workers + ps)
        cluster = {"chief": addresses[:1], "worker": addresses[1 : 1 + workers]}
        if ps:
            cluster["ps"] = addresses[1 + workers :]
        self._spec = ClusterSpec(cluster)
        super().__init__("chief", 0)
