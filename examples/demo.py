"""`make demo`: the digits on two replicas and on one device, on every backend.

Each backend trains in a process of its own, since Keras has one backend per
process. The last batch is uneven on purpose: 1,437 rows in batches of 64 leave 29.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time

BACKENDS = ("jax", "torch", "tensorflow")
REPLICAS = 2
BATCH_SIZE = 64
EPOCHS = 5
HEADER = (
    "backend",
    "replicas",
    "samples/s",
    "final loss",
    "accuracy",
    "largest difference to one device",
)


def load_digits():
    """Scikit-learn's 8x8 digits as images of shape (8, 8, 1) between 0 and 1."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype("float32").reshape(-1, 8, 8, 1)
    return train_test_split(images, labels, test_size=360, random_state=0)


def build_model():
    import keras
    from keras import layers

    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(32, 3, activation="gelu"),
            layers.BatchNormalization(),
            layers.Conv2D(64, 3, activation="gelu"),
            layers.Flatten(),
            layers.Dense(10),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.SGD(0.02),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def train(strategy, data):
    """Trains under a strategy, or without one; returns model, losses and speed."""
    images, test_images, labels, test_labels = data
    if strategy is None:
        model = build_model()
    else:
        with strategy.scope():
            model = build_model()
    model.fit(images, labels, batch_size=BATCH_SIZE, verbose=0, shuffle=False)
    start = time.perf_counter()
    history = model.fit(
        images,
        labels,
        batch_size=BATCH_SIZE,
        epochs=EPOCHS - 1,
        verbose=0,
        shuffle=False,
    )
    seconds = time.perf_counter() - start
    scores = model.evaluate(test_images, test_labels, verbose=0, return_dict=True)
    return {
        "weights": model.get_weights(),
        "losses": history.history["loss"],
        "accuracy": scores["accuracy"],
        "samples_per_second": len(images) * (EPOCHS - 1) / seconds,
    }


def work() -> None:
    """Trains on this process's backend and prints one line of JSON."""
    import numpy as np

    import keras_strategies as ks

    ks.set_virtual_cpu_devices(REPLICAS)
    data = load_digits()
    alone = train(None, data)
    devices = [f"cpu:{i}" for i in range(REPLICAS)]
    # On Torch, a model as small as this would run whole; here it is to be split.
    strategy = ks.MirroredStrategy(devices)
    together = train(strategy, data)
    pairs = list(zip(alone["weights"], together["weights"], strict=True))
    pairs += list(zip(alone["losses"], together["losses"], strict=True))
    row = {
        "replicas": REPLICAS,
        "samples_per_second": together["samples_per_second"],
        "loss": together["losses"][-1],
        "accuracy": together["accuracy"],
        "difference": max(float(np.max(np.abs(a - b))) for a, b in pairs),
    }
    print(json.dumps(row))


def run_backend(backend: str) -> tuple[str, ...] | None:
    """Trains on one backend in a process; a row of the table, None on failure."""
    environment = {
        **os.environ,
        "KERAS_BACKEND": backend,
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "GRPC_VERBOSITY": "ERROR",
    }
    process = subprocess.run(
        [sys.executable, __file__, "--backend", backend],
        env=environment,
        capture_output=True,
        text=True,
    )
    if process.returncode:
        missing = f"No module named '{backend}'"
        if missing in process.stderr:
            return (backend, "not installed", "", "", "", "")
        print(f"{backend} failed:\n{process.stderr}", file=sys.stderr)
        return None
    row = json.loads(process.stdout.splitlines()[-1])
    return (
        backend,
        str(row["replicas"]),
        f"{row['samples_per_second']:,.0f}",
        f"{row['loss']:.4f}",
        f"{row['accuracy']:.4f}",
        f"{row['difference']:.1e}",
    )


def print_table(rows: list[tuple[str, ...]]) -> None:
    widths = [max(len(row[i]) for row in [HEADER, *rows]) for i in range(len(HEADER))]
    rule = tuple("-" * width for width in widths)
    for row in (HEADER, rule, *rows):
        cells = [row[0].ljust(widths[0])]
        cells += [c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True)]
        print("  ".join(cells).rstrip())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", choices=BACKENDS, help="train on this one, here")
    if parser.parse_args().backend:
        work()
        return 0
    rows = []
    for backend in BACKENDS:
        print(f"training on {backend} ...", flush=True)
        row = run_backend(backend)
        if row is None:
            return 1
        rows.append(row)
    print()
    print_table(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
