"""Clusters of real processes, started once for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from harness.forker import Forker
from harness.worker_pool import WorkerPool

CLUSTERS = {"two": (2, 1), "three": (3, 1), "four": (4, 1), "two_by_two": (2, 2)}


@pytest.fixture(scope="session")
def forker() -> Iterator[Forker]:
    """Starts scripts in processes that have imported Keras already."""
    with Forker() as forker:
        yield forker


@pytest.fixture(scope="session")
def cluster(request, forker) -> Iterator[WorkerPool]:
    """The cluster that a test names, by `indirect` parametrization."""
    pool = WorkerPool(forker, *CLUSTERS[request.param])
    yield pool
    pool.close()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    # A test that does not name one gets two workers.
    marks = metafunc.definition.iter_markers("parametrize")
    named = any("cluster" in mark.args[0] for mark in marks)
    if "cluster" in metafunc.fixturenames and not named:
        metafunc.parametrize("cluster", ["two"], indirect=True, scope="session")
