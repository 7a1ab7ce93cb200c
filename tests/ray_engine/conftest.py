"""Ray clusters of several nodes on this machine."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

_BYTES = 80 << 20
#: Lost nodes are noticed in seconds; no processes are started in advance.
_SETTINGS = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 1000,
    "health_check_failure_threshold": 5,
    "worker_niceness": 0,
    "enable_worker_prestart": False,
    "prestart_worker_first_driver": False,
}


class RayNodes:
    """A Ray cluster of a head without CPUs, and of nodes.

    Args:
        nodes: dicts of the nodes' arguments.
    """

    def __init__(self, *nodes: dict[str, Any]):
        from ray.cluster_utils import Cluster

        self._cluster = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": 0,
                "include_dashboard": False,
                "object_store_memory": _BYTES,
                "_system_config": _SETTINGS,
            },
        )
        self.nodes: list[Any] = []
        for node in nodes:
            self.add(**node)
        self._threads: list[threading.Thread] = []
        self._is_closed = threading.Event()

    @property
    def address(self) -> str:
        return self._cluster.address

    def add(self, **arguments: Any) -> None:
        self.nodes.append(
            self._cluster.add_node(object_store_memory=_BYTES, **arguments)
        )

    def kill(self, node_id: str) -> None:
        """Kills a node with all of its processes."""
        (node,) = [each for each in self.nodes if each.node_id == node_id]
        self.nodes.remove(node)
        self._cluster.remove_node(node, allow_graceful=False)

    def kill_when_named(self, file: Path) -> None:
        """Kills the node that a file names, as soon as there is one; in a thread."""

        def wait() -> None:
            while not self._is_closed.wait(0.1):
                if file.exists():
                    self.kill(file.read_text())
                    return

        self._threads.append(threading.Thread(target=wait))
        self._threads[-1].start()

    def close(self) -> None:
        import ray

        self._is_closed.set()
        for thread in self._threads:
            thread.join()
        ray.shutdown()
        self._cluster.shutdown()


@pytest.fixture
def ray_nodes() -> Iterator[Callable[..., RayNodes]]:
    """Starts a Ray cluster with a node for each dict."""
    before = dict(os.environ)
    pytest.importorskip("ray")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    made: list[RayNodes] = []

    def start(*nodes: dict[str, Any]) -> RayNodes:
        made.append(RayNodes(*nodes))
        return made[-1]

    yield start
    for each in made:
        each.close()
    os.environ.clear()
    os.environ.update(before)
