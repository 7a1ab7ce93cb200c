"""A worker that delays the others is named once, and in the status."""

from __future__ import annotations

import time
import warnings

import keras
import numpy as np
import pytest
from multi_worker.clusters import on_clusters

STEPS = 24


def train(strategy, slow, steps=STEPS):
    """The warnings of a `fit` with batches of 60 ms, on worker `slow` of 250 ms."""
    index = strategy.workers.group.index

    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return steps

        def __getitem__(self, number):
            time.sleep(0.25 if index == slow else 0.06)
            return np.ones((6, 2), "float32"), np.ones((6, 1), "float32")

    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(Batches(), verbose=0)
    # Two heartbeats: of the worker, and of the chief.
    time.sleep(1.5)
    found = [str(each.message) for each in caught]
    return [text for text in found if "delays the others" in text]


@pytest.mark.one_backend
@pytest.mark.nightly
@pytest.mark.slow(seconds=25)
@on_clusters("three")
def test_a_slow_worker_is_named_once_and_an_equal_one_never(cluster):
    def program(strategy):
        equal = train(strategy, slow=None)
        status = strategy.status()
        named = train(strategy, slow=1)
        later = strategy.status()
        return equal, status, named, later, train(strategy, slow=1, steps=8)

    found = cluster(program)
    for index, (equal, before, named, status, again) in enumerate(found):
        assert equal == again == []
        assert not any(worker.is_slow for worker in before.workers)
        # The chief's warning is enough.
        assert len(named) == (index == 0)
        assert [worker.is_slow for worker in status.workers] == [False, True, False]
        late = [worker.late for worker in status.workers]
        assert late[1] > 0.1 > max(late[0], late[2])
        assert status.workers_alive == 3
    [text], status = found[0][2], found[0][3]
    process = status.workers[1].process
    assert f"Worker 1 (127.0.0.1, process {process}) delays" in text
    assert "ms each without waits for other workers" in text
    line = str(status).splitlines()[5]
    assert line.split()[:5] == ["worker", "1", "127.0.0.1", str(process), "alive,"]
