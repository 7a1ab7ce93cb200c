"""The training of `elasticity.py` and `restarts.py`: model, data and log of steps."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

WORKERS = 3
ROWS = 86
#: Seconds between steps.
PACE = 0.05
#: Seconds for processes to start and for training to end.
PATIENCE = 120.0


def batch_size(backend: str) -> int:
    """Rows of a global batch; the last one has fewer."""
    return 24 if backend == "jax" else 25


def data() -> tuple[Any, Any]:
    import numpy as np

    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, 4)).astype("float32")
    y = (x[:, :1] + 0.3 * x[:, 1:2] + rng.normal(size=(ROWS, 1)) / 2 > 0).astype("f4")
    return x, y


def make_model() -> Any:
    import keras

    keras.utils.set_random_seed(11)
    model = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(6, "tanh"),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(1, "sigmoid"),
        ]
    )
    rate = keras.optimizers.schedules.ExponentialDecay(0.01, 300, 0.5)
    auc = keras.metrics.AUC(num_thresholds=20, name="auc")
    model.compile(keras.optimizers.Adam(rate), "binary_crossentropy", metrics=[auc])
    return model


def fit(model: Any, epochs: int, callbacks: Any = ()) -> dict[str, list[float]]:
    import keras

    x, y = data()
    options = {"shuffle": False, "verbose": 0, "callbacks": list(callbacks)}
    rows = batch_size(keras.backend.backend())
    history = model.fit(x, y, batch_size=rows, epochs=epochs, **options)
    return dict(history.history)


def step_log(folder: Path, strategy: Any) -> Any:
    """A callback that writes a line for each finished step."""
    import keras

    class StepLog(keras.callbacks.Callback):
        def on_train_begin(self, logs: Any = None) -> None:
            self.log = (folder / f"{os.getpid()}.steps").open("a")

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            time.sleep(PACE)

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            elastic = strategy.workers.elastic
            number = 0
            if elastic is not None:
                number = elastic.membership.generation.number
            count = strategy.workers.group.count
            self.log.write(f"{time.monotonic()} {number} {count}\n")
            self.log.flush()

    return StepLog()


def steps_of(path: Path) -> list[tuple[float, int, int]]:
    """Time, generation and number of workers of each finished step of a process."""
    lines = path.read_text().splitlines() if path.exists() else []
    rows = [line.split() for line in lines]
    return [(float(r[0]), int(r[1]), int(r[2])) for r in rows if len(r) == 3]


def wait_for(holds: Callable[[], Any], what: str) -> Any:
    until = time.monotonic() + PATIENCE
    while not (found := holds()):
        if time.monotonic() > until:
            raise SystemExit(f"waited {PATIENCE:g} s until {what}")
        time.sleep(0.01)
    return found
