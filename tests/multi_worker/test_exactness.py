"""Several workers compute what one device computes, and all of them the same.

The cases are those of `tests/test_exactness.py` that are not slow, each on one of three
clusters in turn: two workers, two with two devices each, and, less often, three.
"""

from __future__ import annotations

import itertools

import keras
import pytest
import test_exactness
from harness.training import Case, alone, assert_same, train

CASES = {case.name: case for case in test_exactness.CASES}
BACKEND = keras.backend.backend()


def runs() -> list:
    # Each worker traces its programs itself: three take as long as both others.
    two = ("two", "two", "two_by_two")
    clusters = itertools.cycle(("two", "three", "two_by_two", *two))
    cases = [
        case
        for case in CASES.values()
        if BACKEND not in case.refused_by and not case.slow
    ]
    return [
        pytest.param(case.name, cluster, id=f"{case.name}-{cluster}")
        for case, cluster in zip(cases, clusters, strict=False)
    ]


def train_case(strategy, name: str):
    import test_exactness

    cases = {case.name: case for case in test_exactness.CASES}
    return train(cases[name], strategy)


def assert_workers_train_alike(case: Case, pool) -> None:
    found = pool(train_case, case.name)
    for index, results in enumerate(found):
        assert_same(alone(case), results, case.tolerance, f"worker {index}")
        # To the last bit, or their models would drift apart. On JAX a batch that does
        # not divide is computed by each worker for itself, and XLA's threads may add up
        # in another order there.
        alike = case.tolerance if BACKEND == "jax" else 0.0
        assert_same(found[0], results, alike, f"worker {index} beside worker 0")


@pytest.mark.parametrize(
    ("name", "cluster"), runs(), indirect=["cluster"], scope="session"
)
def test_same_as_one_device(name, cluster):
    assert_workers_train_alike(CASES[name], cluster)
