"""Trainings in processes that are killed or get signals, and what they leave.

    python resumed_training.py FOLDER STRATEGY STOPS_AT DROPOUT EPOCHS MODEL DATA

trains a model with snapshots in a folder. The process is killed after a number of
steps, as "7", or waits at a place, as "step 7" or "epoch 1"; it writes `there0`, and
goes on when there is `go0`. Without a place it trains to the end and writes
`results.json` and `results.npz`. DATA is "arrays" or "unknown length".
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from harness.forker import Forked, Forker

EPOCHS = 5
BATCH_SIZE = 8
#: The last batch has 5 rows.
ROWS = 37
STEPS = EPOCHS * -(-ROWS // BATCH_SIZE)
#: Processes of a strategy.
WORKERS = {"workers": 2, "three workers": 3}


@dataclass(frozen=True)
class Left:
    """What a training has left."""

    weights: list[Any]
    history: dict[str, list[float]]
    log: str
    best: list[Any]
    trained: int
    #: What the chief has printed.
    text: str


class Resumed:
    """A training that is started again after each kill."""

    def __init__(
        self,
        forker: Forker,
        folder: Path,
        dropout: float = 0.0,
        epochs: int = EPOCHS,
        model: str = "",
        data: str = "arrays",
    ):
        self._forker = forker
        self._settings = (str(dropout), str(epochs), model, data)
        self._epochs = epochs
        self.folder = folder
        folder.mkdir(exist_ok=True)

    def killed(self, strategy: str, after: int) -> None:
        """Trains until all processes are killed after a number of steps."""
        for process in self.start(strategy, str(after)):
            code, _ = process.wait(120)
            assert code in (-signal.SIGKILL, 128 + signal.SIGKILL), process.text()

    def finished(self, strategy: str) -> Left:
        """Trains to the end."""
        processes = self.start(strategy)
        for process in processes:
            code, _ = process.wait(120 + self._epochs)
            assert code == 0, process.text()
        found = json.loads((self.folder / "results.json").read_text())
        with np.load(self.folder / "results.npz") as file:
            arrays = [file[f"arr_{i}"] for i in range(len(file.files))]
        count = len(arrays) // 2
        return Left(
            weights=arrays[:count],
            history=found["history"],
            log=(self.folder / "log.csv").read_text(),
            best=arrays[count:],
            trained=found["trained"],
            text=processes[0].text(),
        )

    def start(self, strategy: str, stops_at: str = "") -> list[Forked]:
        run = len(list(self.folder.glob("*.log"))) + 1
        count = WORKERS.get(strategy, 1)
        logs = [self.folder / f"run{run}-{index}.log" for index in range(count)]
        arguments = (str(self.folder), strategy, stops_at, *self._settings)
        return self._forker.start_workers(logs, __file__, *arguments)


def assert_same_end(found: Left, expected: Left, tolerance: float) -> None:
    """Fails if two trainings ended differently."""
    _assert_close(found.weights, expected.weights, tolerance)
    _assert_close(found.best, expected.best, tolerance)
    assert found.history.keys() == expected.history.keys()
    for name, values in expected.history.items():
        _assert_close([found.history[name]], [values], tolerance, name)
    (header, *rows), (other, *others) = (
        [line.split(",") for line in each.log.splitlines()]
        for each in (found, expected)
    )
    assert header == other
    _assert_close([np.array(rows, float)], [np.array(others, float)], tolerance, "log")


def _assert_close(found: Any, expected: Any, tolerance: float, name: str = "") -> None:
    for mine, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine, other, tolerance, tolerance, err_msg=name)


def _strategy(name: str) -> Any:
    import keras_strategies as ks

    devices = ["cpu:0", "cpu:1", "cpu:2"]
    if name == "one_device":
        return ks.OneDeviceStrategy("cpu:0")
    if name == "mirrored":
        return ks.MirroredStrategy(devices)
    if name == "central":
        return ks.CentralStorageStrategy(devices[1:], "cpu:0")
    if name in WORKERS:
        options = ks.CommunicationOptions(timeout_seconds=30)
        return ks.MultiWorkerMirroredStrategy(communication_options=options)
    if name == "model_parallel":
        return ks.ModelParallelStrategy("auto", devices[:2], 2, min_shard_bytes=0)
    return None


def _snapshots(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("snapshots/snapshot-0*")}


def _input(x: Any, y: Any, weights: Any, data: str) -> dict[str, Any]:
    """Arguments of `fit`."""
    if data == "arrays":
        return {"x": x, "y": y, "sample_weight": weights, "batch_size": BATCH_SIZE}
    import torch

    class Batches(torch.utils.data.IterableDataset):
        def __iter__(self) -> Any:
            for start in range(0, ROWS, BATCH_SIZE):
                yield tuple(a[start : start + BATCH_SIZE] for a in (x, y, weights))

    return {"x": torch.utils.data.DataLoader(Batches(), batch_size=None)}


def main() -> None:
    import contextlib

    import keras
    from harness.drawing_models import DRAWING

    import keras_strategies as ks

    # Ctrl-C is ignored in the background of a script.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    folder, name, stops_at = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    dropout, epochs, kind = float(sys.argv[4]), int(sys.argv[5]), sys.argv[6]
    if name not in WORKERS:
        ks.set_virtual_cpu_devices(3)
    strategy = _strategy(name)
    workers = strategy.workers if strategy is not None else None
    index = workers.group.index if workers else 0
    is_chief = workers is None or workers.group.is_chief
    keras.utils.set_random_seed(11)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, 4)).astype("float32")
    y = (x[:, :1] + 0.3 * x[:, 1:2] > 0).astype("float32")
    weights = rng.uniform(0.5, 1.5, ROWS).astype("float32")
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        hidden = [keras.layers.Dense(6, "tanh"), keras.layers.BatchNormalization()]
        if dropout:
            hidden.append(keras.layers.Dropout(dropout, seed=5))
        if kind:
            hidden = DRAWING[kind]()
        last = keras.layers.Dense(1, "sigmoid")
        model = keras.Sequential([keras.Input((4,)), *hidden, last])
        auc = keras.metrics.AUC(num_thresholds=20, name="auc")
        model.compile(
            keras.optimizers.Adam(0.03), "binary_crossentropy", weighted_metrics=[auc]
        )
    trained = 0
    before = _snapshots(folder)

    class Stops(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            nonlocal trained
            trained += 1
            (folder / "begun").touch()
            if str(trained) == stops_at:
                # A step takes less time than a file.
                while is_chief and _snapshots(folder) == before:
                    time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGKILL)
            self.wait(f"step {trained}")

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.wait(f"epoch {epoch}")

        def wait(self, place: str) -> None:
            if place == stops_at:
                (folder / f"there{index}").touch()
                until = time.monotonic() + 60
                while not (folder / f"go{index}").exists():
                    assert time.monotonic() < until
                    time.sleep(0.005)

    history = model.fit(
        **_input(x, y, weights, sys.argv[7]),
        epochs=epochs,
        verbose=0,
        validation_data=(x[:11], y[:11]),
        callbacks=[
            ks.callbacks.Resume(folder / "snapshots", every_steps=2, stream="skip"),
            keras.callbacks.CSVLogger(folder / "log.csv"),
            keras.callbacks.ModelCheckpoint(
                folder / "best.weights.h5", save_best_only=True, save_weights_only=True
            ),
            keras.callbacks.ReduceLROnPlateau("loss", patience=1, min_delta=0.05),
            keras.callbacks.EarlyStopping("val_loss", patience=max(3, epochs // 2)),
            Stops(),
        ],
    )
    if is_chief:
        final = model.get_weights()
        model.load_weights(folder / "best.weights.h5")
        np.savez(folder / "results.npz", *final, *model.get_weights())
        found = {"history": history.history, "trained": trained}
        (folder / "results.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
