"""Planted mistakes are found by `ks.verify`, with their causes."""

from __future__ import annotations

import keras
import pytest
from verification import planted_in_fit, planted_in_loops
from verification.planted_in_fit import Planted

import keras_strategies as ks

pytestmark = pytest.mark.one_backend

BACKEND = keras.backend.backend()
CASES = [*planted_in_fit.CASES, *planted_in_loops.CASES]
LOOPS = ("own_means", "mean_of_means", "log_of_means", "unreduced", "constant_seed")
BY_DAY = {
    "jax": {"wider", "batch_per_replica", "centered", "divided_loss"},
    "torch": {
        *("scaled_rate", "batch_per_replica", "own_noise", "centered", "batch_norm"),
        *(f"loop_{name}" for name in (*LOOPS, "batch_max")),
    },
    "tensorflow": {"order", "of_replicas", "centered", "divided_loss"},
}


def _parameter(case: Planted) -> object:
    marks = [] if case.name in BY_DAY[BACKEND] else [pytest.mark.nightly]
    return pytest.param(case, id=case.name, marks=marks)


def test_there_are_forty() -> None:
    assert len({case.name for case in CASES}) == len(CASES) >= 40


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "case", [_parameter(case) for case in CASES if BACKEND in case.backends]
)
def test_a_planted_mistake_is_found_and_named(case: Planted) -> None:
    strategy = ks.MirroredStrategy(["cpu:0", "cpu:1"], **case.strategy)
    report = ks.verify(
        case.build or planted_in_fit.dense,
        case.data or planted_in_fit.data,
        strategy,
        steps=3 if case.name == "counted" else 2,
        step=case.step,
    )
    assert not report, f"{case.name} was not found"
    assert report.cause in case.cause.split("|"), report
    assert report.first is not None
    assert case.kind in ("", report.first.kind), report
    assert report.cause in str(report)
