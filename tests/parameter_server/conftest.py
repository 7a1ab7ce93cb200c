"""Clusters for tests of parameter servers: processes are forked, clusters shared."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
from harness.forker import Forker

import keras_strategies as ks
from keras_strategies.parameter_server.coordinator import process_cluster as cluster
from parameter_server import clusters
from parameter_server.forked_cluster import ForkedProcesses


@pytest.fixture(scope="package", autouse=True)
def forks(forker: Forker) -> Iterator[None]:
    """Clusters of these tests fork their processes."""
    forked = functools.partial(ForkedProcesses, forker)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cluster, "ClusterProcesses", forked)
        yield


@pytest.fixture(scope="package")
def synchronous(forks):
    """One step after the other, variables in two parts on two servers."""
    with clusters.start_synchronous() as strategy:
        yield strategy


@pytest.fixture(scope="package")
def asynchronous(forks, tmp_path_factory):
    """Steps without order; what dies here comes back, servers from snapshots."""
    with clusters.start(
        workers=2,
        ps=1,
        snapshot_seconds=clusters.SNAPSHOT_SECONDS,
        snapshot_folder=str(tmp_path_factory.mktemp("snapshots")),
        silence_seconds=5.0,
    ) as strategy:
        yield strategy
        clusters.assert_nothing_broke(strategy)


@pytest.fixture
def recovered(asynchronous):
    """The asynchronous cluster with all of its processes, before and after a fault."""
    clusters.wait_until_whole(asynchronous)
    yield asynchronous
    clusters.wait_until_whole(asynchronous)


@pytest.fixture
def strategy(asynchronous):
    return asynchronous


@pytest.fixture
def coordinator(strategy):
    return ks.ClusterCoordinator(strategy)
