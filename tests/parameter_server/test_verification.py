"""`ks.verify` with parameter servers: no alarm on what is sound, mistakes are named."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import pytest
from verification import planted_in_fit, planted_on_servers
from verification.planted_in_fit import Planted, dense

import keras_strategies as ks
from parameter_server import clusters

pytestmark = pytest.mark.one_backend


@pytest.fixture(scope="module")
def servers(forks) -> Iterator[Any]:
    with clusters.start(workers=2, ps=1, max_staleness=0) as strategy:
        yield strategy


def dropout() -> Any:
    """Its seed has more digits than float32."""
    return dense(keras.layers.Dropout(0.3, seed=413_654_321))


SOUND: dict[str, dict[str, Any]] = {
    "dropout": {"build": dropout, "data": planted_in_fit.data},
    "resumed": {"build": dropout, "data": planted_in_fit.data, "resume_after": 2},
    "table": {"build": planted_on_servers.table, "data": planted_on_servers.ids},
    "loop": {
        "build": dense,
        "data": planted_in_fit.data,
        "step": planted_on_servers.step,
    },
}


@pytest.mark.parametrize("name", SOUND)
def test_no_alarm(servers, name: str) -> None:
    report = ks.verify(**SOUND[name], strategy=servers, steps=4)
    assert report, report
    assert "equal in 4 steps" in str(report)


def found_and_named(case: Planted, strategy: Any) -> None:
    build, data = case.build or dense, case.data or planted_in_fit.data
    report = ks.verify(build, data, strategy, steps=2, step=case.step)
    assert not report, f"{case.name} was not found"
    assert report.cause in case.cause.split("|"), report
    assert case.kind in ("", report.first and report.first.kind), report


@pytest.mark.nightly(unless=["server_rate", "server_batch"])
@pytest.mark.parametrize("case", planted_on_servers.CASES, ids=lambda case: case.name)
def test_a_planted_mistake_is_found_and_named(servers, case: Planted) -> None:
    found_and_named(case, servers)


@pytest.mark.nightly
def test_asynchronous_servers_are_an_error(asynchronous) -> None:
    with pytest.raises(ValueError, match="Pass `max_staleness=0`"):
        ks.verify(dense, planted_in_fit.data, asynchronous)
