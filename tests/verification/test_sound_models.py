"""`ks.verify` raises no alarm on what people train: 80 sound models.

The recipes of the field suite, keras-hub's models in small, and keras.applications.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import pytest

pytest.importorskip("keras_hub", reason="keras_hub is not installed")

from exactness import test_applications
from field import models, recipes
from harness import data as datasets

import keras_strategies as ks

pytestmark = pytest.mark.one_backend

BACKEND = keras.backend.backend()
#: Its arrays have different numbers of rows, which is an error of `verify`.
LEFT_OUT = {"graph_per_batch"}
#: `build` and `data` of `ks.verify`, by name.
MODELS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    case.name: (
        case.build,
        lambda case=case: _of_fit(case.feed, case.data(case.rows), case.batch),
    )
    for case in (*models.CASES, *recipes.CASES)
    if BACKEND not in case.refused_by and case.name not in LEFT_OUT
}
MODELS |= {
    name: (
        functools.partial(test_applications.application, name),
        lambda: _of_fit(datasets.arrays, test_applications.pictures(8), 4),
    )
    for name in test_applications.EPSILONS
}


def _of_fit(feed: datasets.Feed, rows: datasets.Data, batch: int) -> dict[str, Any]:
    given = feed(rows, batch)
    given.pop("steps", None)
    return {**given, "shuffle": False}


@pytest.mark.nightly(unless=["diffusion", "mixup"])
@pytest.mark.parametrize("name", MODELS)
def test_no_alarm(name: str) -> None:
    build, data = MODELS[name]
    strategy = ks.MirroredStrategy(["cpu:0", "cpu:1"])
    report = ks.verify(build, data, strategy, steps=2)
    assert report, report
    assert report.cause == ""


def test_there_are_fifty() -> None:
    assert len(MODELS) > 50
