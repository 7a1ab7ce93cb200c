"""Clusters of real processes, started once for all tests of a job."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from harness.worker_pool import Cluster, WorkerPool
from multi_worker.clusters import CLUSTERS, DEVICES


@pytest.fixture(scope="session")
def pool_of(forker) -> Iterator[Callable[[int], WorkerPool]]:
    """The processes for a number of workers."""
    pools: dict[int, WorkerPool] = {}

    def start(workers: int) -> WorkerPool:
        if workers not in pools:
            pools[workers] = WorkerPool(forker, workers, DEVICES[workers])
        return pools[workers]

    yield start
    for pool in pools.values():
        pool.close()


@pytest.fixture(scope="session")
def cluster(request, pool_of) -> Cluster:
    """The cluster that a test names, by `indirect` parametrization."""
    workers, devices = CLUSTERS[request.param]
    return pool_of(workers).cluster(devices)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    # A test that does not name one gets two workers.
    marks = metafunc.definition.iter_markers("parametrize")
    named = any("cluster" in mark.args[0] for mark in marks)
    if "cluster" in metafunc.fixturenames and not named:
        metafunc.parametrize("cluster", ["two"], indirect=True, scope="session")
