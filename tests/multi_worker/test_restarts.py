"""Workers that are started again after a loss train on where their backup is."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from harness.processes import assert_gone, launch, write_script
from harness.training import assert_same

import keras_strategies as ks
from keras_strategies.cluster.resolvers.local_processes import free_addresses

pytestmark = [
    pytest.mark.one_backend,
    pytest.mark.multiprocess,
    pytest.mark.skipif(os.name != "posix", reason="process groups are POSIX"),
]

EPOCHS = 4

TRAIN = """
import keras
import numpy as np
import keras_strategies as ks


def train(strategy, callbacks=()):
    keras.utils.set_random_seed(5)
    rng = np.random.default_rng(5)
    x = rng.normal(size=(44, 4)).astype("float32")
    y = x[:, :1] - x[:, 1:2]
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(1)]
        )
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
    model.fit(
        x, y, batch_size=8, epochs=4, shuffle=False, verbose=0, callbacks=callbacks
    )
    return model
"""

SCRIPT = (
    TRAIN
    + """
victim = sys.argv[1]
attempt = len(list(here.glob(me + "-*.pid")))
(here / (me + ".pid")).rename(here / f"{me}-{attempt}.pid")


class Watch(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        print("attempt", attempt, "epoch", epoch, flush=True)

    def on_train_batch_begin(self, batch, logs=None):
        if me == victim and attempt == 0 and self.steps() == 15:
            os.kill(os.getpid(), signal.SIGKILL)

    def steps(self):
        return int(keras.ops.convert_to_numpy(self.model.optimizer.iterations))


options = ks.CommunicationOptions(timeout_seconds=30)
strategy = ks.MultiWorkerMirroredStrategy(communication_options=options)
callbacks = [keras.callbacks.BackupAndRestore(here / "backup"), Watch()]
model = train(strategy, callbacks)
np.savez(here / (me + ".npz"), *model.get_weights())
"""
)


EPOCHS_SEEN = [
    *(f"attempt 0 epoch {epoch}" for epoch in range(3)),
    # 6 steps in an epoch; the third was under way.
    *(f"attempt 1 epoch {epoch}" for epoch in range(2, EPOCHS)),
]


def assert_trained_as_without_a_failure(folder: Path) -> None:
    names = {}
    exec(TRAIN, names)
    expected = names["train"](ks.OneDeviceStrategy("cpu:0")).get_weights()
    expected = {i: np.asarray(value) for i, value in enumerate(expected)}
    for worker in range(2):
        with np.load(folder / f"worker{worker}.npz") as file:
            found = dict(enumerate(file.values()))
        assert_same(expected, found, 1e-5, f"worker {worker}")
    assert_gone([int(path.read_text()) for path in folder.glob("*.pid")])
    # The backup is for a run that goes on; this one is done.
    assert not (folder / "backup").exists()


@pytest.mark.nightly(unless=["worker1"])
@pytest.mark.slow(seconds=8)
@pytest.mark.parametrize("victim", ["worker1", "worker0"])
def test_workers_that_are_started_again_end_with_the_same_weights(
    forker, tmp_path, victim
):
    script = write_script(tmp_path, SCRIPT)
    logs = [[tmp_path / f"{i}-{attempt}.log" for i in range(2)] for attempt in range(2)]
    for attempt in range(2):
        addresses = free_addresses(2)
        processes = [
            forker.start(
                log,
                script,
                victim,
                TF_CONFIG=json.dumps(
                    {
                        "cluster": {"worker": addresses},
                        "task": {"type": "worker", "index": index},
                    }
                ),
            )
            for index, log in enumerate(logs[attempt])
        ]
        codes = [process.wait(120)[0] for process in processes]
        assert all(codes) if attempt == 0 else not any(codes), processes[0].text()
    for worker in range(2):
        lines = "".join(log[worker].read_text() for log in logs).splitlines()
        assert [line for line in lines if line.startswith("attempt ")] == EPOCHS_SEEN
    assert_trained_as_without_a_failure(tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("victim", ["worker1", "worker0"])
def test_the_launcher_starts_them_again(tmp_path, victim):
    script = write_script(tmp_path, SCRIPT)
    process = launch("--workers", "2", "--max-restarts", "2", script, victim)
    assert process.returncode == 0, process.stderr
    number = victim[-1]
    assert f"worker {number} was ended by SIGKILL; ending the others" in process.stderr
    assert "restarting (1 of 2) with new ports." in process.stderr
    assert "(2 of 2)" not in process.stderr
    for worker in range(2):
        lines = process.stdout.splitlines()
        printed = f"[worker {worker}] attempt "
        found = [line.split("] ")[1] for line in lines if line.startswith(printed)]
        assert found == EPOCHS_SEEN
    assert_trained_as_without_a_failure(tmp_path)
