"""Several workers compute what one device computes, and all of them the same.

The cases are those of `tests/test_exactness.py`. The fast part trains those on two
workers that are in the fast part there; the full part trains every case on one more
cluster, three workers and two with two devices each in turn.
"""

from __future__ import annotations

import keras
import pytest
import test_exactness
from harness.training import Case, alone, assert_same, train

CASES = {case.name: case for case in test_exactness.CASES}
BACKEND = keras.backend.backend()


def runs() -> list:
    found = []
    for number, case in enumerate(CASES.values()):
        if BACKEND in case.refused_by:
            continue
        if not case.slow:
            found.append(pytest.param(case.name, "two", id=f"{case.name}-two"))
        other = ("three", "two_by_two")[number % 2]
        found.append(
            pytest.param(
                case.name, other, id=f"{case.name}-{other}", marks=pytest.mark.slow
            )
        )
    return found


def train_case(strategy, name: str):
    import test_exactness

    cases = {case.name: case for case in test_exactness.CASES}
    return train(cases[name], strategy)


def assert_workers_train_alike(case: Case, pool) -> None:
    found = pool(train_case, case.name)
    for index, results in enumerate(found):
        assert_same(alone(case), results, case.tolerance, f"worker {index}")
        # To the last bit, or their models would drift apart.
        assert_same(found[0], results, 0.0, f"worker {index} beside worker 0")


@pytest.mark.parametrize(
    ("name", "cluster"), runs(), indirect=["cluster"], scope="session"
)
def test_same_as_one_device(name, cluster):
    assert_workers_train_alike(CASES[name], cluster)
