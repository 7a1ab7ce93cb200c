"""A script that trains on several workers, one of which does what it should not.

    faulty.py FAULT PLACE VICTIM FOLDER

FAULT is what worker VICTIM does in epoch 2 (see `Fault`). PLACE is where: in a
"callback" before step 17, so that the others wait in collectives; in the "data" of
step 17; or while it is "saving" after epoch 2.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import keras
import numpy as np

import keras_strategies as ks

TIMEOUT = 5
STEPS, EPOCHS, BATCH = 10, 3, 8


class Fault:
    """What happens on the victim, once."""

    def __init__(self, kind: str, folder: Path):
        self.kind = kind
        self._folder = folder

    def note(self, name: str) -> None:
        """Writes the time into a file."""
        (self._folder / f"{name}.time").write_text(repr(time.time()))

    def happen(self) -> None:
        self.note("fault")
        if self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif self.kind == "hang":  # Its connections live on.
            time.sleep(600)
        elif self.kind == "raise":
            raise ValueError("bad rows in file 3")
        elif self.kind == "exit":
            sys.exit(0)


class AtStep(keras.callbacks.Callback):
    def __init__(self, fault: Fault):
        super().__init__()
        self._fault = fault
        self._epoch = 0

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch

    def on_train_batch_begin(self, batch, logs=None):
        if (self._epoch, batch) == (1, 6):
            self._fault.happen()


class Data(keras.utils.PyDataset):
    """The rows of arrays, in order; the fault is in the reading of one batch."""

    def __init__(self, x, y, fault: Fault | None):
        super().__init__()
        self._arrays, self._fault = (x, y), fault
        self._read = 0

    def __len__(self):
        return STEPS

    def __getitem__(self, index):
        self._read += 1
        if self._fault is not None and self._read == STEPS + 7:
            self._fault.happen()
        rows = slice(index * BATCH, (index + 1) * BATCH)
        return tuple(array[rows] for array in self._arrays)


@keras.saving.register_keras_serializable("faulty")
class Layer(keras.layers.Dense):
    """A dense layer; the fault is between its first and its last byte in a file."""

    fault: Fault | None = None
    saved = 0

    def save_own_variables(self, store):
        super().save_own_variables(store)
        Layer.saved += 1
        if Layer.fault is not None and Layer.saved == 2:
            Layer.fault.happen()


def train(kind: str, place: str, victim: int, folder: Path) -> None:
    communication = ks.CommunicationOptions(timeout_seconds=TIMEOUT)
    fault = Fault(kind, folder)
    fault.note("begin")
    strategy = ks.MultiWorkerMirroredStrategy(communication_options=communication)
    is_victim = strategy.cluster_resolver.task_id == victim
    x = np.random.default_rng(0).normal(size=(STEPS * BATCH, 5)).astype("float32")
    y = x[:, :2]
    with strategy.scope():
        model = keras.Sequential([keras.Input((5,)), Layer(8), Layer(2)])
        model.compile("sgd", "mse")
    # Wide enough to be in the middle of a file.
    callbacks = [keras.callbacks.ModelCheckpoint(folder / "checkpoints" / "last.keras")]
    data, batch_size = (x, y), BATCH
    if place == "data":
        data, batch_size = (Data(x, y, fault if is_victim else None),), None
    elif is_victim and place == "callback":
        callbacks.append(AtStep(fault))
    elif is_victim and place == "saving":
        # Two layers in each file.
        Layer.fault, Layer.saved = fault, -2
    options = {"epochs": EPOCHS, "shuffle": False, "verbose": 0}
    model.fit(*data, batch_size=batch_size, callbacks=callbacks, **options)


if __name__ == "__main__":
    try:
        train(*sys.argv[1:3], int(sys.argv[3]), Path(sys.argv[4]))
    except (ks.errors.WorkerError, ks.errors.ClusterError) as error:
        print(f"ERROR {time.time()!r} {type(error).__name__} {error}", flush=True)
        raise
