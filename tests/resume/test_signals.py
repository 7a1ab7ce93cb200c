"""Ctrl-C and SIGTERM save a snapshot; the next start says where it continues."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from harness.forker import Forked, Forker

pytestmark = pytest.mark.one_backend

ADAM_TOLERANCE = 1e-4
EPOCHS, STEPS = 3, 5

# Trains; says how far it is, and waits there until it may go on.
SCRIPT = """
import signal, sys, time
from pathlib import Path
import keras, numpy as np
import keras_strategies as ks

# Ctrl-C is ignored in the background of a script.
signal.signal(signal.SIGINT, signal.default_int_handler)
folder, snapshots, stops_at, kind = Path(sys.argv[1]), *sys.argv[2:5]
workers = int(sys.argv[5])
options = ks.CommunicationOptions(timeout_seconds=60)
if workers > 1:
    strategy = ks.MultiWorkerMirroredStrategy(communication_options=options)
    index = strategy.input_context().input_pipeline_id
else:
    strategy, index = ks.MirroredStrategy(["cpu:0", "cpu:1"]), 0
rng = np.random.default_rng(0)
x = rng.normal(size=(37, 4)).astype("float32")
y = x[:, :1] * 2 - x[:, 1:2]
keras.utils.set_random_seed(11)
with strategy.scope():
    model = keras.Sequential([
        keras.Input((4,)), keras.layers.Dense(6, "tanh"), keras.layers.Dropout(0.2),
        keras.layers.Dense(1),
    ])
    model.compile(keras.optimizers.Adam(0.01), "mse")
steps = 0

class At(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        global steps
        steps += 1
        self.wait(f"step {steps}")

    def on_epoch_end(self, epoch, logs=None):
        self.wait(f"epoch {epoch}")

    def wait(self, place):
        if place == stops_at:
            (folder / f"there{index}").write_text("")
            until = time.monotonic() + 60
            while not (folder / f"go{index}").exists():
                assert time.monotonic() < until
                time.sleep(0.005)

def batches():
    for start in range(0, 37, 8):
        yield x[start : start + 8], y[start : start + 8]

resume = ks.callbacks.Resume(snapshots, stream="skip")
arguments = dict(epochs=3, verbose=0, callbacks=[resume, At()])
if kind == "unknown length":
    import torch
    class Rows(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(list(batches()))
    loader = torch.utils.data.DataLoader(Rows(), batch_size=None)
    history = model.fit(loader, **arguments)
else:
    history = model.fit(x, y, batch_size=8, **arguments)
if index == 0:
    found = {str(i): value for i, value in enumerate(model.get_weights())}
    np.savez(folder / "end.npz", loss=history.history["loss"], steps=steps, **found)
"""


class Training:
    """Processes of a training in a folder."""

    def __init__(
        self, forker: Forker, folder: Path, workers: int = 1, kind: str = "arrays"
    ):
        folder.mkdir(exist_ok=True)
        self.forker, self.folder = forker, folder
        self.workers, self.kind = workers, kind
        self.script = folder / "script.py"
        self.script.write_text(SCRIPT)
        self.starts = 0

    def start(self, stops_at: str = "") -> list[Forked]:
        self.starts += 1
        logs = [self.folder / f"log{self.starts}-{i}" for i in range(self.workers)]
        folders = str(self.folder), str(self.folder / "snapshots")
        arguments = (*folders, stops_at, self.kind, str(self.workers))
        return self.forker.start_workers(logs, str(self.script), *arguments)

    def stopped(self, stops_at: str, number: int, victim: int = 0) -> list[str]:
        """Sends a signal to one process at a place; returns what all have printed."""
        processes = self.start(stops_at)
        try:
            for index in range(self.workers):
                wait_for(self.folder / f"there{index}", processes)
            os.kill(processes[victim].pid, number)
            for index in range(self.workers):
                (self.folder / f"go{index}").write_text("")
            codes = [process.wait(120)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
        texts = [process.text() for process in processes]
        for index, code in enumerate(codes):
            if number == signal.SIGINT and index == victim:
                assert code != 0 and "KeyboardInterrupt" in texts[index]
            else:
                assert code == 143, texts[index][-3000:]
        return texts

    def finished(self) -> tuple[dict[str, Any], str]:
        processes = self.start()
        try:
            for process in processes:
                assert process.wait(120)[0] == 0, process.text()[-3000:]
        finally:
            for process in processes:
                process.kill()
        with np.load(self.folder / "end.npz") as file:
            return dict(file), processes[0].text()


def wait_for(file: Path, processes: list[Forked]) -> None:
    until = time.monotonic() + 100
    while not file.exists():
        assert not any(p.ended() for p in processes), processes[0].text()
        assert time.monotonic() < until, file.name
        time.sleep(0.01)


@pytest.mark.one_backend("torch")
@pytest.mark.nightly(unless=["SIGTERM-1-epoch 1"])
@pytest.mark.parametrize(
    ("number", "workers", "stops_at", "kind", "place"),
    [
        (signal.SIGINT, 1, "step 7", "arrays", "epoch 2 of 3, step 3 of 5"),
        (signal.SIGTERM, 1, "epoch 1", "arrays", "epoch 3 of 3, step 1 of 5"),
        (signal.SIGTERM, 2, "step 7", "arrays", "epoch 2 of 3, step 3 of 5"),
        (signal.SIGINT, 2, "step 5", "arrays", "epoch 2 of 3, step 1 of 5"),
        (signal.SIGTERM, 1, "step 2", "unknown length", "epoch 1 of 3, step 3"),
    ],
    ids=["SIGINT-1", "SIGTERM-1-epoch 1", "SIGTERM-2", "SIGINT-2", "unknown length"],
)
def test_a_signal_saves_and_training_continues(
    forker: Forker,
    number: int,
    workers: int,
    stops_at: str,
    kind: str,
    place: str,
    tmp_path: Path,
) -> None:
    training = Training(forker, tmp_path / "stopped", workers, kind)
    # To the worker that is not the chief, if there are two.
    texts = training.stopped(stops_at, number, victim=workers - 1)
    assert f"no snapshot in '{tmp_path}/stopped/snapshots', training begins" in texts[0]
    said = f"before the end of this process; started again, it continues at {place}"
    assert said in texts[0], texts[0]
    assert not any("Resume:" in text for text in texts[1:]), "the chief says it once"
    found, text = training.finished()
    assert f"Resume: continuing at {place}" in text
    assert 0 < found["steps"] < EPOCHS * STEPS
    expected, _ = Training(forker, tmp_path / "whole", 1, kind).finished()
    assert expected.pop("steps") == EPOCHS * STEPS
    for name, value in expected.items():
        np.testing.assert_allclose(
            found[name], value, ADAM_TOLERANCE, ADAM_TOLERANCE, err_msg=name
        )
    if kind == "arrays" and workers == 1:
        _, text = training.finished()
        assert "is finished, after 3 of 3 epochs: nothing to do." in text


def test_a_second_interrupt_ends_at_once(forker: Forker, tmp_path: Path) -> None:
    training = Training(forker, tmp_path)
    (process,) = training.start("step 2")
    try:
        wait_for(tmp_path / "there0", [process])
        # The first one asks for a stop after the step, which waits for 60 seconds.
        until = time.monotonic() + 30
        while not process.ended() and time.monotonic() < until:
            os.kill(process.pid, signal.SIGINT)
            time.sleep(0.2)
        assert process.ended()
    finally:
        process.kill()
    assert "KeyboardInterrupt" in process.text()
    assert "before the end" not in process.text()


def test_an_interrupt_after_an_error_in_fit_is_an_interrupt(tmp_path: Path) -> None:
    import keras_strategies as ks

    class Broken(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            raise KeyError("broken")

    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    x = np.zeros((8, 4), "float32")
    before = signal.default_int_handler
    # Another test may have left a `fit` by an error, and its handler with it.
    signal.signal(signal.SIGINT, before)
    with pytest.raises(KeyError, match="broken"):
        model.fit(x, x, verbose=0, callbacks=[ks.callbacks.Resume(tmp_path), Broken()])
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
