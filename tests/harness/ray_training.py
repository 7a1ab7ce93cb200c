"""Training in processes that Ray starts, and the same on one device."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np

ROWS, BATCH = 64, 16
EPOCHS = 3
#: The step in which the node of a worker is killed.
KILL_STEP = 5


def data() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    x = random.normal(size=(ROWS, 4)).astype("float32")
    return x, x.sum(1, keepdims=True).astype("float32")


def model() -> Any:
    import keras

    keras.utils.set_random_seed(1)
    made = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    made.compile("adam", "mse")
    return made


def fit(trained: Any, callbacks: list[Any]) -> tuple[list[np.ndarray], list[float]]:
    """Trains; returns the weights and the losses of the epochs."""
    x, y = data()
    history = trained.fit(
        x, y, BATCH, EPOCHS, verbose=0, shuffle=False, callbacks=callbacks
    )
    return trained.get_weights(), history.history["loss"]


def on_one_device() -> tuple[list[np.ndarray], list[float]]:
    return fit(model(), [])


def waits_for_its_end(folder: str, rank: int, victim: int | None) -> Any:
    """A callback with which the victim waits in a step until its process is killed.

    Another process of the victim finds the file of the first one and does not wait.
    """
    import keras
    import ray

    class Wait(keras.callbacks.Callback):
        steps = 0

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.steps += 1
            mark = Path(folder) / f"node-of-{rank}"
            if rank == victim and self.steps == KILL_STEP and not mark.exists():
                part = mark.with_suffix(".part")
                part.write_text(ray.get_runtime_context().get_node_id())
                part.rename(mark)
                time.sleep(600)

    return Wait()


def train(
    folder: str, victim: int | None = None, resumes: bool = False, resolver: Any = None
) -> tuple[list[np.ndarray], list[float]]:
    """The script of a worker.

    Args:
        folder: str, for snapshots and the node of the victim.
        victim: int, the worker that waits for its end.
        resumes: bool, whether training continues at a snapshot.
        resolver: `ClusterResolver`, or None.
    """
    import keras_strategies as ks

    strategy = ks.MultiWorkerMirroredStrategy(
        resolver, ks.CommunicationOptions(timeout_seconds=200)
    )
    rank = strategy.cluster_resolver.task_id
    callbacks = [waits_for_its_end(folder, rank, victim)]
    if resumes:
        callbacks.append(ks.callbacks.Resume(f"{folder}/resume", every_steps=2))
    with strategy.scope():
        made = model()
    return fit(made, callbacks)
