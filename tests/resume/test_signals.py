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
from harness.training import ADAM_TOLERANCE
from resume.resumed_training import ROWS, Resumed, assert_same_end

pytestmark = pytest.mark.one_backend

EPOCHS, STEPS = 3, -(-ROWS // 8)
STRATEGIES = {1: "mirrored", 2: "workers"}


def stopped(
    training: Resumed, workers: int, stops_at: str, number: int, victim: int
) -> list[str]:
    """Sends a signal to one process at a place; returns what all have printed."""
    folder = training.folder
    processes = training.start(STRATEGIES[workers], stops_at)
    try:
        for index in range(workers):
            wait_for(folder / f"there{index}", processes)
        os.kill(processes[victim].pid, number)
        for index in range(workers):
            (folder / f"go{index}").touch()
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
    settings = {"dropout": 0.2, "epochs": EPOCHS, "data": kind}
    training = Resumed(forker, tmp_path / "stopped", **settings)
    # To the worker that is not the chief, if there are two.
    texts = stopped(training, workers, stops_at, number, victim=workers - 1)
    assert f"no snapshot in '{tmp_path}/stopped/snapshots', training begins" in texts[0]
    said = f"before the end of this process; started again, it continues at {place}"
    assert said in texts[0], texts[0]
    assert not any("Resume:" in text for text in texts[1:]), "the chief says it once"
    found = training.finished(STRATEGIES[workers])
    assert f"Resume: continuing at {place}" in found.text
    expected = Resumed(forker, tmp_path / "whole", **settings).finished("mirrored")
    assert 0 < found.trained < expected.trained == EPOCHS * STEPS
    assert_same_end(found, expected, ADAM_TOLERANCE)
    if kind == "arrays" and workers == 1:
        text = training.finished("mirrored").text
        assert "is finished, after 3 of 3 epochs: nothing to do." in text


def test_a_second_interrupt_ends_at_once(forker: Forker, tmp_path: Path) -> None:
    (process,) = Resumed(forker, tmp_path).start("mirrored", "step 2")
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
