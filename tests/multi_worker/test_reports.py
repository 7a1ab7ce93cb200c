"""What `strategy.timeline()` and `strategy.status()` say of all workers."""

from __future__ import annotations

import json
import time
import warnings

import keras
import numpy as np
import pytest
from multi_worker.clusters import dense, on_clusters

STEPS = 6


def train(strategy, folder):
    """A training with a save; the file of its timeline."""
    model = dense(strategy, 3, lambda: [keras.layers.Dense(1)])
    x = np.zeros([4 * STEPS, 3], "float32")
    model.fit(x, x[:, :1], batch_size=4, verbose=0)
    model.save(folder / "model.keras")
    found = strategy.timeline()
    file = folder / f"run{strategy.cluster_resolver.task_id}.json"
    assert found.save(file) == str(file)
    assert f"of {strategy.num_replicas_in_sync} workers" in repr(found)
    return [each for each in found.events if each["ph"] == "X"]


def spans(events, worker, name):
    """Begins and ends of a worker's events in its thread that trains, in seconds."""
    found = [each for each in events if (each["pid"], each["cat"]) == (worker, name)]
    return sorted((e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6) for e in found)


def test_all_workers_have_their_events_on_one_clock(cluster, tmp_path):
    one, two = cluster(lambda strategy: train(strategy, tmp_path))
    files = [json.loads((tmp_path / f"run{i}.json").read_text()) for i in range(2)]
    assert files[0] == files[1]
    assert [e for e in files[0]["traceEvents"] if e["ph"] == "X"] == one == two
    steps = [spans(one, worker, "compute")[-STEPS:] for worker in range(2)]
    assert len(steps[0]) == len(steps[1]) == STEPS
    # No worker begins the next step but one before the other has begun the next.
    for mine, others in (steps, steps[::-1]):
        for step in range(STEPS - 2):
            assert others[step][0] < mine[step + 2][0]
    for worker in range(2):
        assert len(spans(one, worker, "data")) >= STEPS
        assert spans(one, worker, "wait")
        begin, _ = spans(one, worker, "other")[-1]
        assert begin <= steps[worker][0][0]
    # The chief writes the file, for which the other one waits.
    begin, end = spans(one, 0, "save")[-1]
    assert any(b < end <= e + 0.5 for b, e in spans(one, 1, "wait")), (begin, end)


BATCHES = 24


def train_slowly(strategy, slow, steps=BATCHES):
    """The warnings of a `fit` with batches of 60 ms, on worker `slow` of 250 ms."""
    index = strategy.workers.group.index

    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return steps

        def __getitem__(self, number):
            time.sleep(0.25 if index == slow else 0.06)
            return np.ones((6, 2), "float32"), np.ones((6, 1), "float32")

    model = dense(strategy, 2, lambda: [keras.layers.Dense(1)])
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
        equal = train_slowly(strategy, slow=None)
        status = strategy.status()
        named = train_slowly(strategy, slow=1)
        later = strategy.status()
        return equal, status, named, later, train_slowly(strategy, slow=1, steps=8)

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
