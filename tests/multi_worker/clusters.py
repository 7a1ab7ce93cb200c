"""The clusters of these tests, by name."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from harness.forker import Forker
from harness.worker_pool import Cluster, WorkerPool

#: Workers, and devices of each. The first two have the same processes.
CLUSTERS = {"two": (2, 1), "two_by_two": (2, 2), "three": (3, 1), "four": (4, 1)}
DEVICES = {2: 2, 3: 1, 4: 1}


def on_clusters(*names: str) -> pytest.MarkDecorator:
    """Runs a test on each of these clusters."""
    return pytest.mark.parametrize("cluster", names, indirect=True, scope="session")


@contextlib.contextmanager
def own_cluster(forker: Forker, workers: int = 2) -> Iterator[Cluster]:
    """Processes of a test's own: after an error they train together no more."""
    pool = WorkerPool(forker, workers)
    try:
        yield pool.cluster(1)
    finally:
        pool.close()
