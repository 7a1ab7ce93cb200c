"""Synchronous training on the nodes of a Ray cluster.

ray start --head              # and `ray start --address=HOST:6379` on other machines
python ray_workers.py --workers 2
"""

from __future__ import annotations

import argparse
import tempfile

import keras_strategies as ks


def train(directory: str, epochs: int) -> list[float]:
    """The script of each worker."""
    import keras
    import numpy as np

    x = np.random.default_rng(0).normal(size=(512, 8)).astype("float32")
    y = x[:, :1] > 0
    strategy = ks.MultiWorkerMirroredStrategy()
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1, "sigmoid")])
        model.compile("adam", "binary_crossentropy")
    history = model.fit(
        x,
        y,
        batch_size=64,
        epochs=epochs,
        verbose=0,
        callbacks=[ks.callbacks.Resume(directory)],
    )
    return [float(loss) for loss in history.history["loss"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", help="of the Ray cluster, such as host:6379")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--directory", help="a folder that all nodes see")
    given = parser.parse_args()
    resolver = ks.cluster_resolver.RayClusterResolver(given.address, given.workers)
    with tempfile.TemporaryDirectory() as folder:
        losses = resolver.run(
            train, (given.directory or folder, given.epochs), max_restarts=3
        )
    print(f"loss of each epoch: {losses[0]}")


if __name__ == "__main__":
    main()
