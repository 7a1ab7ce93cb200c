"""Two clusters that all tests of this room share: starting one takes seconds."""

from __future__ import annotations

import pytest

from keras_strategies.experimental import partitioners
from parameter_server import clusters


@pytest.fixture(scope="package")
def synchronous():
    """One step after the other, variables in two parts on two servers."""
    with clusters.start(
        workers=1,
        ps=2,
        max_staleness=0,
        variable_partitioner=partitioners.FixedShardsPartitioner(2),
    ) as strategy:
        yield strategy


@pytest.fixture(scope="package")
def asynchronous(tmp_path_factory):
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
