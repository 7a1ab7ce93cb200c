"""Training of elastic workers until a file `stop` exists, as a process.

    python elastic_until_stopped.py FOLDER [VICTIM]

Each worker writes `INDEX.state` after each step: its generation, the number of workers
and its steps; and a line to `PID.steps`: the time, its generation, rank and steps. At
the end it writes `INDEX.npz` and `INDEX.json`. `VICTIM` is the number of a worker that
kills itself once, at its 20th step; with a file `INDEX.PLACE`, a worker kills itself in
one of `PLACES`. While a file `hold` exists, no worker confirms a generation; each
writes `INDEX.formed` when it waits for one, and `INDEX.held` when it would confirm it.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from harness.processes import TIMEOUT

#: Seconds without heartbeats after which a worker is lost.
SILENCE = float(os.environ.get("SILENCE", 3))
# On JAX, only batches that divide by the number of workers are split: the last is not.
_ROWS = 44
_BATCH = 12
# Seconds between steps.
_PACE = 0.05
#: Where a worker kills itself: in a callback, in evaluation, in saving.
PLACES = ("callback", "evaluation", "saving")


def make_model() -> Any:
    import keras

    keras.utils.set_random_seed(5)
    hidden = [keras.layers.Dense(6, "tanh"), keras.layers.BatchNormalization()]
    last = [keras.layers.Dropout(0.2), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((4,)), *hidden, *last])
    model.compile(keras.optimizers.SGD(0.02, momentum=0.9), "mse", metrics=["mae"])
    return model


def fit(model: Any, epochs: int, callbacks: Any = ()) -> dict[str, list[float]]:
    rng = np.random.default_rng(5)
    x = rng.normal(size=(_ROWS, 4)).astype("float32")
    y = x[:, :1] - x[:, 1:2]
    options = {"batch_size": _BATCH, "epochs": epochs, "verbose": 0}
    options |= {"validation_data": (x[:23], y[:23]), "validation_batch_size": _BATCH}
    return dict(model.fit(x, y, callbacks=list(callbacks), **options).history)


def hold_generations(folder: Path, index: int) -> None:
    from keras_strategies.cluster.group.membership import Membership

    confirm, reform = Membership.confirm, Membership.reform

    def confirm_later(self: Membership) -> None:
        while (folder / "hold").exists():
            (folder / f"{index}.held").touch()
            time.sleep(_PACE)
        confirm(self)

    def reform_and_say(self: Membership, *args: Any, **options: Any) -> Any:
        (folder / f"{index}.formed").touch()
        return reform(self, *args, **options)

    Membership.confirm = confirm_later  # type: ignore[method-assign]
    Membership.reform = reform_and_say  # type: ignore[method-assign]


def main(folder: Path, victim: int) -> None:
    import keras

    import keras_strategies as ks

    faulthandler.dump_traceback_later(TIMEOUT)
    index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    hold_generations(folder, index)
    strategy = ks.MultiWorkerMirroredStrategy(
        communication_options=ks.CommunicationOptions(timeout_seconds=SILENCE),
        # The launcher sets it by itself.
        elastic=None if "KS_ELASTIC" in os.environ else ks.Elastic(),
    )
    with strategy.scope():
        model = make_model()

    def die(place: str) -> None:
        order = folder / f"{index}.{place}"
        if order.exists():
            order.unlink()
            os.kill(os.getpid(), signal.SIGKILL)

    class Steps(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            time.sleep(_PACE)
            killed = folder / "killed"
            if index == victim and self.steps() == 20 and not killed.exists():
                killed.touch()
                os.kill(os.getpid(), signal.SIGKILL)

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            faulthandler.dump_traceback_later(TIMEOUT)
            generation = strategy.workers.actions.membership.generation
            state = [generation.number, strategy.workers.group.count, self.steps()]
            write(folder / f"{index}.state", state)
            numbers = [time.monotonic(), generation.number, generation.rank, state[2]]
            with open(folder / f"{os.getpid()}.steps", "a") as file:
                file.write(f"{json.dumps(numbers)}\n")
            die("callback")

        def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
            die("evaluation")

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            # The chief's decision is that of all.
            self.model.stop_training = (folder / "stop").exists()

        def steps(self) -> int:
            return int(keras.ops.convert_to_numpy(self.model.optimizer.iterations))

    class Saving(keras.callbacks.ModelCheckpoint):
        def _save_model(self, *args: Any, **kwargs: Any) -> None:
            die("saving")
            super()._save_model(*args, **kwargs)

    saving = Saving(folder / "saved.weights.h5", save_weights_only=True)
    history = fit(model, 10**6, [Steps(), saving])
    np.savez(folder / f"{index}.npz", *model.get_weights())
    write(folder / f"{index}.json", history)


def write(path: Path, value: Any) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps(value))
    part.rename(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int((sys.argv[2:] or [-1])[0]))
