"""The cluster of this process: it belongs to one, for which its engine is started."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from keras_strategies.communication.communicator import Communicator


@dataclass(frozen=True)
class JoinedCluster:
    """The cluster that a process has joined.

    Args:
        addresses: those of the workers.
        index: int, the number of this worker.
        workers: the communicator between the workers.
    """

    addresses: tuple[str, ...]
    index: int
    workers: Communicator


_cluster: JoinedCluster | None = None


def joined_cluster() -> JoinedCluster | None:
    """The cluster of this process; None without one."""
    return _cluster


def joined_workers() -> Communicator | None:
    """The communicator of this process's cluster; None without one."""
    return None if _cluster is None else _cluster.workers


def set_joined_cluster(cluster: JoinedCluster | None) -> None:
    """Called when this process has joined a cluster; with None, when it leaves."""
    global _cluster
    _cluster = cluster
