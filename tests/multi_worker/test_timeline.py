"""`strategy.timeline()` has the events of all workers, on one clock."""

from __future__ import annotations

import json

import keras
import numpy as np
import pytest

pytestmark = pytest.mark.multiprocess
STEPS = 6


def train(strategy, folder):
    """A training with a save; the file of its timeline."""
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
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
