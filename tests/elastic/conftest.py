"""Elastic workers, started as forks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from elastic.elastic_training import ElasticCluster, Settings
from elastic.endless_runs import Run
from harness.forker import Forker


@pytest.fixture
def cluster(
    forker: Forker, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Callable[..., ElasticCluster]]:
    """Starts the workers of a training, with the `SCRIPT` of the test's module."""
    script = [each for each in [getattr(request.module, "SCRIPT", None)] if each]
    made: list[ElasticCluster] = []

    def make(**settings: Any) -> ElasticCluster:
        given = Settings(str(tmp_path), **settings)
        made.append(ElasticCluster(forker, given, *script))
        for index in range(-1, given.workers):
            made[-1].start(index)
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def run(forker: Forker, tmp_path: Path) -> Iterator[Run]:
    """A training that runs until it is told to end."""
    with contextlib.closing(Run(forker, tmp_path, None)) as made:
        yield made
