"""A termination signal to one worker: all save at one step and go on there."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import keras
import numpy as np
import pytest
from harness.forker import Forked, Forker
from harness.processes import assert_gone, wait_until
from harness.training import SGD_TOLERANCE, assert_same

import keras_strategies as ks
from keras_strategies.training.saving.preemption import RESTART_EXIT_CODE

pytestmark = pytest.mark.one_backend

# Trains in the given way; takes some time for each batch, and says how far it is.
SCRIPT = """
import sys, time
from pathlib import Path
import keras, numpy as np
import keras_strategies as ks

folder, kind, workers = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
if workers > 1:
    options = ks.CommunicationOptions(timeout_seconds=30)
    strategy = ks.MultiWorkerMirroredStrategy(communication_options=options)
    index = strategy.input_context().input_pipeline_id
else:
    strategy, index = ks.OneDeviceStrategy("cpu:0"), 0
rng = np.random.default_rng(0)
x = rng.normal(size=(46, 4)).astype("float32")
y = x[:, :1] * 2 - x[:, 1:2]
keras.utils.set_random_seed(11)
with strategy.scope():
    model = keras.Sequential([
        keras.Input((4,)),
        keras.layers.Dense(6, "tanh"),
        keras.layers.Dense(1),
    ])
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
    model.compile(optimizer, "mse")
    optimizer.build(model.trainable_variables)
steps = 0

class Slow(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        global steps
        steps += 1
        (folder / f"steps{index}").write_text(str(steps))
        if kind != "undisturbed":
            time.sleep(0.03)

handler = ks.PreemptionCheckpointHandler(None, model, folder / kind)
slow = Slow()
while handler.total_run_calls < 36:
    start = handler.total_run_calls % 6 * 8
    batch = x[start : start + 8], y[start : start + 8]
    handler.run(model.train_on_batch, *batch)
    slow.on_train_batch_end(0)
if index == 0:
    found = {str(i): value for i, value in enumerate(model.get_weights())}
    found["iterations"] = np.asarray(optimizer.iterations)
    np.savez(folder / f"{kind}.npz", **found)
"""


def start(forker: Forker, folder: Path, kind: str, workers: int) -> list[Forked]:
    script = folder / "script.py"
    script.write_text(SCRIPT)
    logs = [folder / f"{kind}{index}.log" for index in range(workers)]
    for index, log in enumerate(logs):
        (folder / f"steps{index}").unlink(missing_ok=True)
        log.with_suffix(".end").unlink(missing_ok=True)
    arguments = (str(folder), kind, str(workers))
    return forker.start_workers(logs, str(script), *arguments)


def finish(processes: list[Forked], code: int) -> list[str]:
    try:
        for process in processes:
            found, _ = process.wait(120)
            assert found == code, process.text()[-3000:]
    finally:
        for process in processes:
            process.kill()
    assert_gone([process.pid for process in processes])
    return [process.text() for process in processes]


def results(folder: Path, kind: str) -> dict[str, np.ndarray]:
    with np.load(folder / f"{kind}.npz") as file:
        return dict(file)


@pytest.mark.nightly(unless=["1"])
@pytest.mark.parametrize("workers", [1, 2])
def test_preempted_training_takes_the_steps_that_were_left(workers, forker, tmp_path):
    processes = start(forker, tmp_path, "loop", workers)
    # Amid the second epoch, on the worker that is not the chief if there are two.
    file = tmp_path / f"steps{workers - 1}"
    wait_until(lambda: file.exists() and int(file.read_text() or 0) >= 8, "8 steps")
    os.kill(processes[-1].pid, signal.SIGTERM)
    texts = finish(processes, RESTART_EXIT_CODE)
    assert "Training was saved in" in texts[0]
    taken = [int((tmp_path / f"steps{i}").read_text()) for i in range(workers)]
    assert len(set(taken)) == 1 and 8 <= taken[0] < 36
    finish(start(forker, tmp_path, "loop", workers), 0)
    assert not list(tmp_path.rglob("loop/**/.part*"))
    found = results(tmp_path, "loop")
    assert found["iterations"] == 36
    finish(start(forker, tmp_path, "undisturbed", 1), 0)
    expected = results(tmp_path, "undisturbed")
    assert_same(expected, found, SGD_TOLERANCE, "after the restart")


def test_a_watcher_and_an_exit_of_ones_own(tmp_path):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    ended = []
    config = ks.TerminationConfig(
        termination_watcher_fn=lambda: True, exit_fn=lambda: ended.append(True)
    )
    handler = ks.PreemptionCheckpointHandler(None, model, tmp_path, config)
    with handler.watch_preemption_scope():
        wait_until(lambda: handler.run(bool) is False and bool(ended), "the watcher")
    assert list((tmp_path / "preempted").glob("snapshot-*.zip"))
    again = ks.PreemptionCheckpointHandler(None, model, tmp_path)
    again.close()
    assert again.total_run_calls > 0


def test_what_cannot_be(tmp_path):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    resolvers = ks.cluster_resolver
    spec = resolvers.ClusterSpec({"worker": ["127.0.0.1:1", "127.0.0.1:2"]})
    two = resolvers.SimpleClusterResolver(spec, task_type="worker", task_id=0)
    for arguments, kind, text in (
        ((None, None, tmp_path), ValueError, r"keras\.Model"),
        ((None, 5, tmp_path), ValueError, r"keras\.Model"),
        ((None, model), ValueError, "must be the folder"),
        ((two, model, tmp_path), ValueError, "describes 2 workers, but 1 have connect"),
        (("TF_CONFIG", model, tmp_path), TypeError, r"ks\.cluster_resolver.*'TF_CONF"),
    ):
        with pytest.raises(kind, match=text):
            ks.PreemptionCheckpointHandler(*arguments)
    with pytest.raises(ValueError, match="0 or more"):
        ks.TerminationConfig(grace_period=-1)
    with pytest.raises(ValueError, match="must be a function"):
        ks.TerminationConfig(exit_fn=3)
