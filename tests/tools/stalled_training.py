"""Two workers train; worker 1 stalls at a step, in a way that the argument names.

`python stalled_training.py KIND FOLDER`; KIND "none" trains on. When it stalls, a file
`FOLDER/stalled` exists. Lines with the comment `# stalls` are those that `top` names.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import sys
import threading
import time
import zipfile
from pathlib import Path

import keras
import numpy as np

import keras_strategies as ks

# Longer than the tests look.
LONG = 60.0
kind, folder = sys.argv[1], Path(sys.argv[2])
me = json.loads(os.environ["TF_CONFIG"])["task"]["index"]


def begin() -> bool:
    """Whether this worker stalls, in the step after the twentieth."""
    if me != 1 and kind != "save":
        return False
    (folder / "stalled").touch()
    return True


class Slow:
    """An object of which the garbage collector has much to do."""

    def __del__(self) -> None:
        time.sleep(LONG)  # stalls gc


class Stall(keras.callbacks.Callback):
    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        if batch != 20:
            return
        if kind == "lock" and begin():
            lock = threading.Lock()
            lock.acquire()
            lock.acquire(timeout=LONG)  # stalls lock
        if kind == "gc" and begin():
            cycle = [Slow()]
            cycle.append(cycle)
            del cycle
            gc.collect()
        if kind == "save":
            self.model.save(folder / "model.keras")
        if kind == "stop" and begin():
            time.sleep(1.0)


def batches():
    rng = np.random.default_rng(0)
    for number in itertools.count():
        if kind == "loader" and number == 20 and begin():
            time.sleep(LONG)  # stalls loader
        if kind == "delay" and me == 1:
            if number == 20:
                begin()
            time.sleep(0.1)  # stalls delay
        yield rng.random((16, 8), "float32"), rng.random((16, 1), "float32")


def slow_write(*args: object, **kwargs: object) -> None:
    begin()
    time.sleep(LONG)  # stalls save


if kind == "save":
    zipfile.ZipFile.writestr = slow_write
strategy = ks.MultiWorkerMirroredStrategy()
with strategy.scope():
    model = keras.Sequential([keras.layers.Dense(32, "relu"), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
if kind == "outside" and begin():
    time.sleep(LONG)  # stalls outside
steps = 100_000 if kind != "none" else 200
model.fit(batches(), steps_per_epoch=steps, callbacks=[Stall()], verbose=2)
strategy.timeline().save(folder / f"run{me}.json")
