"""Several workers compute what one device computes, and all of them the same.

The cases, the cluster of each and the reason for it: `multi_worker/worker_cases.py`.
"""

from __future__ import annotations

import keras
import pytest
from harness.marks import BACKENDS
from harness.training import alone, assert_same, train
from multi_worker.clusters import with_clusters
from multi_worker.worker_cases import WORKER_CASES, WorkerCase

BACKEND = keras.backend.backend()


def train_case(strategy, name: str):
    from multi_worker.worker_cases import WORKER_CASES

    [case] = [each.case for each in WORKER_CASES if each.case.name == name]
    return train(case, strategy)


def marks(case: WorkerCase) -> list[pytest.MarkDecorator]:
    if BACKEND in case.nightly_on:
        return [pytest.mark.nightly]
    return [pytest.mark.one_backend(*(n for n in BACKENDS if n not in case.nightly_on))]


@pytest.mark.slow(seconds=15)
@with_clusters(
    "worker_case cluster",
    [
        pytest.param(
            *(each, each.cluster),
            id=f"{each.case.name}-{each.cluster}",
            marks=marks(each),
        )
        for each in WORKER_CASES
    ],
)
def test_same_as_one_device(worker_case: WorkerCase, cluster):
    case = worker_case.case
    found = cluster(train_case, case.name)
    for index, results in enumerate(found):
        assert_same(alone(case), results, case.tolerance, f"worker {index}")
        # To the last bit, or their models would drift apart.
        assert_same(found[0], results, 0.0, f"worker {index} beside worker 0")
