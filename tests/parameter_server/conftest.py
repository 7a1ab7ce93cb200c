"""Clusters for tests of parameter servers: processes are forked, clusters shared."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
from harness.forked_cluster import ForkingManager
from harness.forker import Forker

from keras_strategies.coordinator import cluster
from keras_strategies.coordinator.processes import Manager
from keras_strategies.experimental import partitioners
from parameter_server import clusters


@pytest.fixture(scope="package")
def forker() -> Iterator[Forker]:
    with Forker() as made:
        yield made


@pytest.fixture(scope="package", autouse=True)
def forks(forker: Forker) -> Iterator[None]:
    """Clusters of these tests fork their processes, without Ray; see `by_ray`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cluster, "Manager", functools.partial(ForkingManager, forker))
        yield


@pytest.fixture
def by_ray(forks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray starts the processes of clusters in a test, as it does for users."""
    monkeypatch.setattr(cluster, "Manager", Manager)


@pytest.fixture(scope="package")
def synchronous(forks):
    """One step after the other, variables in two parts on two servers."""
    with clusters.start(
        workers=1,
        ps=2,
        max_staleness=0,
        variable_partitioner=partitioners.FixedShardsPartitioner(2),
    ) as strategy:
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
