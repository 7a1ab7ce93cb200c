"""One script for one machine and for many: scikit-learn's digits on all workers.

    python multi_worker.py                                      # one worker
    keras-strategies launch --workers 2 multi_worker.py         # two on this machine
    torchrun --nproc-per-node=2 multi_worker.py                 # the same
    srun --ntasks=8 python multi_worker.py                      # SLURM
    mpirun -n 2 python multi_worker.py                          # MPI
    kubectl apply -f kubernetes/multi_worker.yaml               # Kubernetes
    TF_CONFIG='{"cluster": ...}' python multi_worker.py         # on each machine

Every worker runs it. `--batch-size` is the global batch, whatever the number of
workers, so the numbers that it prints are the same for all of them.
"""

from __future__ import annotations

import argparse

import keras
from keras import layers

import keras_strategies as ks


def load_data():
    """Images of shape (rows, 8, 8, 1) between 0 and 1, and their labels."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype("float32").reshape(-1, 8, 8, 1)
    return (images[:1437], labels[:1437]), (images[1437:], labels[1437:])


def build_model() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(16, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.GlobalAveragePooling2D(),
            layers.Dense(10),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64, help="the global batch")
    parser.add_argument("--backup", help="a folder, to go on where a run was ended")
    options = parser.parse_args()

    # Before anything else uses the backend: the workers meet here.
    strategy = ks.MultiWorkerMirroredStrategy()
    resolver = strategy.cluster_resolver
    is_chief = resolver is None or resolver.is_chief

    keras.utils.set_random_seed(0)
    (x, y), (test_x, test_y) = load_data()
    with strategy.scope():
        model = build_model()
        model.compile(
            optimizer=keras.optimizers.SGD(0.05, momentum=0.9),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    callbacks = []
    if options.backup:
        callbacks.append(keras.callbacks.BackupAndRestore(options.backup))
    # The chief alone shows progress and writes files; the others do so silently.
    model.fit(
        x,
        y,
        batch_size=options.batch_size,
        epochs=options.epochs,
        callbacks=callbacks,
        verbose=2,
    )
    loss, accuracy = model.evaluate(test_x, test_y, verbose=0)
    if is_chief:
        workers = 1 if resolver is None else resolver.num_workers
        print(
            f"{keras.backend.backend()}: {workers} workers, "
            f"{strategy.num_replicas_in_sync} replicas"
        )
        print(f"test loss: {loss:.5f}, accuracy: {accuracy:.4f}", flush=True)


if __name__ == "__main__":
    main()
