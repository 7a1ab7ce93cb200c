"""`ks.verify` raises no alarm on what the exactness suite trains: 93 sound models."""

from __future__ import annotations

from typing import Any

import keras
import pytest
from exactness import cases, single_cases
from harness.case import Case, compiled

import keras_strategies as ks

pytestmark = pytest.mark.one_backend

#: An endless generator has a number of steps, which is an argument of `verify`. At the
#: end of a generator Keras takes a step without rows (`without_phantom_step`).
LEFT_OUT = {"generator_endless", "size_1_generator"}
CASES = {
    case.name: case
    for case in (*cases.CASES, *single_cases.CASES)
    if case.script is None
    and case.name not in LEFT_OUT
    and keras.backend.backend() not in case.refused_by
}


def arguments_of(case: Case) -> dict[str, Any]:
    rows = case.make_data()
    return {**case.feed(rows, case.batch), "shuffle": False, **case.fit(rows)}


@pytest.mark.nightly(unless=["nested_inputs", "auc", "tied_embeddings"])
@pytest.mark.parametrize("name", CASES)
def test_no_alarm(name: str) -> None:
    case = CASES[name]
    strategy = ks.MirroredStrategy(["cpu:0", "cpu:1"])
    report = ks.verify(
        lambda: compiled(case), lambda: arguments_of(case), strategy, steps=2
    )
    assert report, report
    assert report.cause == ""


def test_there_are_fifty() -> None:
    assert len(CASES) > 50
