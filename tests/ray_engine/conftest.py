"""Ray clusters of several nodes on this machine, one for the tests of a module."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import keras_strategies as ks

TESTS = Path(__file__).parents[1]
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
    """A Ray cluster of a head without CPUs, and of equal nodes.

    Args:
        node: dict, Ray's arguments of a node.
    """

    def __init__(self, node: dict[str, Any]):
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
        self._node = node
        self.nodes: list[Any] = []

    @property
    def address(self) -> str:
        return self._cluster.address

    def fill(self, count: int) -> None:
        """Adds nodes up to a number."""
        while len(self.nodes) < count:
            self.add()

    def add(self) -> None:
        node = self._cluster.add_node(object_store_memory=_BYTES, **self._node)
        self.nodes.append(node)

    @contextlib.contextmanager
    def added(self) -> Iterator[None]:
        """Another node, which is removed in the end."""
        self.add()
        added = self.nodes[-1]
        try:
            yield
        finally:
            if added in self.nodes:
                self.kill(added.node_id)

    def kill(self, node_id: str) -> None:
        """Kills a node with all of its processes."""
        (node,) = [each for each in self.nodes if each.node_id == node_id]
        self.nodes.remove(node)
        self._cluster.remove_node(node, allow_graceful=False)

    @contextlib.contextmanager
    def killed_when_named(self, file: Path) -> Iterator[None]:
        """Kills the node that a file names, as soon as there is one; in a thread."""
        is_over = threading.Event()

        def wait() -> None:
            while not is_over.wait(0.1):
                if file.exists():
                    self.kill(file.read_text())
                    return

        thread = threading.Thread(target=wait)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()

    def close(self) -> None:
        import ray

        ray.shutdown()
        self._cluster.shutdown()


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[RayNodes]:
    """A cluster to which this process is connected, of the module's `NODE`s."""
    before, interrupt = dict(os.environ), signal.getsignal(signal.SIGINT)
    pytest.importorskip("ray")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # Ray's workers import what tests give them, also where only pytest has this path.
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(TESTS), os.environ.get("PYTHONPATH")])
    )
    nodes = RayNodes(request.module.NODE)
    try:
        ks.cluster_resolver.RayClusterResolver(nodes.address).connect()
        yield nodes
    finally:
        nodes.close()
        os.environ.clear()
        os.environ.update(before)
        signal.signal(signal.SIGINT, interrupt)


@pytest.fixture
def ray_nodes(request: pytest.FixtureRequest, cluster: RayNodes) -> RayNodes:
    """The cluster, with as many nodes as the module's `NODES`."""
    cluster.fill(request.module.NODES)
    return cluster


@pytest.fixture(autouse=True)
def leak_police(ray_nodes: RayNodes, leak_police: None) -> None:
    """After the start of nodes, which later tests use, too."""
