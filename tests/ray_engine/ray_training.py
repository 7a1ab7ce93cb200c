"""Training in processes that Ray starts, and the same on one device."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np

#: The last batch has 11 rows, which no number of workers here divides.
ROWS, BATCH = 59, 16
EPOCHS = 3
STEPS = EPOCHS * -(-ROWS // BATCH)
#: The step in which the node of a worker is killed.
KILL_STEP = 5
#: The step in which elastic workers wait for another one.
JOIN_STEP = 9
_SECONDS = 240.0


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


def write(file: Path, text: str = "") -> None:
    part = file.with_suffix(".part")
    part.write_text(text)
    part.rename(file)


def faults(folder: str, strategy: Any, victim: int | None, joins: bool) -> Any:
    """A callback with which a victim waits in a step until its process is killed.

    Another process of the victim finds the file of the first one and does not wait.

    Args:
        folder: str, for files.
        strategy: the strategy.
        victim: int, a worker.
        joins: bool, whether the others wait in a later step for another process.
    """
    import keras
    import ray

    rank = strategy.cluster_resolver.task_id
    mark = Path(folder) / f"node-of-{rank}"

    class Faults(keras.callbacks.Callback):
        steps = 0
        is_first = not mark.exists()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.steps += 1
            if rank == victim and self.steps == KILL_STEP and self.is_first:
                write(mark, ray.get_runtime_context().get_node_id())
                time.sleep(600)
            if joins and self.steps == JOIN_STEP:
                await_newcomer(strategy, Path(folder))

    return Faults()


def has_newcomer(membership: Any) -> bool:
    """Whether a worker waits for the next generation."""
    return any(row["waits"] for row in membership.client.status()["workers"])


def await_newcomer(strategy: Any, folder: Path) -> None:
    """Waits until a new worker waits at the chief, after the driver has made room."""
    workers, file = strategy.workers, folder / "joins"
    until = time.monotonic() + _SECONDS
    write(folder / "waits")
    while not file.exists():
        assert time.monotonic() < until, "no worker has joined"
        if workers.is_chief and has_newcomer(workers.actions.membership):
            write(file)
        time.sleep(0.05)


def train(
    folder: str,
    victim: int | None = None,
    resumes: bool = False,
    resolver: Any = None,
    joins: bool = False,
) -> tuple[list[np.ndarray], list[float]]:
    """The script of a worker.

    Args:
        folder: str, for snapshots and the node of the victim.
        victim: int, the worker that waits for its end.
        resumes: bool, whether training continues at a snapshot.
        resolver: `ClusterResolver`, or None.
        joins: bool, whether workers wait for another one after the end of the victim.
    """
    import keras_strategies as ks

    strategy = ks.MultiWorkerMirroredStrategy(
        resolver, ks.CommunicationOptions(timeout_seconds=200)
    )
    assert strategy.workers is not None, "this worker is alone"
    callbacks = [faults(folder, strategy, victim, joins)]
    if resumes:
        callbacks.append(ks.callbacks.Resume(f"{folder}/resume", every_steps=2))
    with strategy.scope():
        made = model()
    return fit(made, callbacks)


def train_in_trainer(config: dict[str, Any]) -> None:
    """The function of a trainer of Ray Train; writes what a worker ends with."""
    import importlib

    import keras
    import ray.train

    import keras_strategies as ks

    if config["started"]:
        distributed = importlib.import_module(f"{config['started']}.distributed")
        assert distributed.is_initialized()
    resolver = ks.cluster_resolver.RayClusterResolver() if config["given"] else None
    victim = config["victim"]
    weights, losses = train(config["folder"], victim, victim is not None, resolver)
    found = {f"weight{i}": value for i, value in enumerate(weights)}
    rank = ray.train.get_context().get_world_rank()
    name = f"{config['folder']}/{keras.backend.backend()}-{rank}.npz"
    np.savez(name, losses=losses, **found)
