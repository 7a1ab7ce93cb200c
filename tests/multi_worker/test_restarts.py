"""Workers that are started again after a loss train on where their backup is."""

from __future__ import annotations

import os

import numpy as np
import pytest
from harness.processes import assert_gone, write_script
from harness.training import assert_workers
from multi_worker.test_hosts import TRAIN, trained_alone

EPOCHS = 4
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
        steps = int(keras.ops.convert_to_numpy(self.model.optimizer.iterations))
        if me == victim and attempt == 0 and steps == 15:
            os.kill(os.getpid(), signal.SIGKILL)


options = ks.CommunicationOptions(timeout_seconds=30)
model = make(ks.MultiWorkerMirroredStrategy(communication_options=options))
fit(model, 4, [keras.callbacks.BackupAndRestore(here / "backup"), Watch()])
np.savez(here / (me + ".npz"), *model.get_weights())
"""
)
EPOCHS_SEEN = [
    *(f"attempt 0 epoch {epoch}" for epoch in range(3)),
    # The third was under way.
    *(f"attempt 1 epoch {epoch}" for epoch in range(2, EPOCHS)),
]


@pytest.mark.one_backend
@pytest.mark.multiprocess
@pytest.mark.skipif(os.name != "posix", reason="process groups are POSIX")
@pytest.mark.nightly(unless=["worker1"])
@pytest.mark.slow(seconds=8)
@pytest.mark.parametrize("victim", ["worker1", "worker0"])
def test_workers_that_are_started_again_end_with_the_same_weights(
    forker, tmp_path, victim
):
    script = write_script(tmp_path, SCRIPT)
    logs = [[tmp_path / f"{i}-{attempt}.log" for i in range(2)] for attempt in range(2)]
    for attempt in range(2):
        processes = forker.start_workers(logs[attempt], script, victim)
        codes = [process.wait(120)[0] for process in processes]
        assert all(codes) if attempt == 0 else not any(codes), processes[0].text()
    found = []
    for worker in range(2):
        lines = "".join(log[worker].read_text() for log in logs).splitlines()
        assert [line for line in lines if line.startswith("attempt ")] == EPOCHS_SEEN
        with np.load(tmp_path / f"worker{worker}.npz") as file:
            found.append(dict(enumerate(file.values())))
    assert_workers(trained_alone(EPOCHS), found)
    assert_gone([int(path.read_text()) for path in tmp_path.glob("*.pid")])
    # The backup is for a run that goes on; this one is done.
    assert not (tmp_path / "backup").exists()
