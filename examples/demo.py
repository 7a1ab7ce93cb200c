"""`make demo`: the digits on one device and on two, on every backend, compared.

Each backend trains in a process of its own, since Keras has one backend per
process. All begin with the same weights, which NumPy draws. The last batch is uneven on
purpose: 1,437 rows in batches of 64 leave 29.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time

BACKENDS = ("jax", "torch", "tensorflow")
DEVICES = ("cpu:0", "cpu:1")
BATCH_SIZE = 64
EPOCHS = 5
HEADER = (
    "backend",
    "loss, one device",
    "two devices",
    "accuracy, one device",
    "two devices",
    "largest difference",
)
ABOUT = """\
A small network learns scikit-learn's digits (1,437 images, 5 epochs) on one device and
on two virtual devices of this CPU, on each backend. All begin with the same weights and
see the same batches; the difference says how far two devices are from one. Half a
minute for each backend, more on a busy machine, mostly to import the framework.
"""
READING = """\
The largest difference is that of all weights and losses: float32 rounds at about 1e-7.
Two virtual devices share one CPU, so they are no faster here."""


def load_digits():
    """Scikit-learn's 8x8 digits as images of shape (8, 8, 1) between 0 and 1."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype("float32").reshape(-1, 8, 8, 1)
    return train_test_split(images, labels, test_size=360, random_state=0)


def build_model():
    """A network with initial weights of NumPy, equal on each backend."""
    import keras
    import numpy as np
    from keras import layers

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
    generator = np.random.default_rng(0)
    for layer in model.layers:
        if hasattr(layer, "kernel"):
            shape = tuple(layer.kernel.shape)
            scale = np.prod(shape[:-1]) ** -0.5
            kernel = generator.normal(0, scale, shape).astype("float32")
            layer.kernel.assign(kernel)
    model.compile(
        optimizer=keras.optimizers.SGD(0.02),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def train(strategy, data):
    """Trains under a strategy, or without one; returns weights, losses, accuracy."""
    images, test_images, labels, test_labels = data
    if strategy is None:
        model = build_model()
    else:
        with strategy.scope():
            model = build_model()
    history = model.fit(
        images, labels, BATCH_SIZE, epochs=EPOCHS, verbose=0, shuffle=False
    )
    scores = model.evaluate(test_images, test_labels, verbose=0, return_dict=True)
    return {
        "weights": model.get_weights(),
        "losses": history.history["loss"],
        "accuracy": scores["accuracy"],
    }


def work() -> None:
    """Trains on this process's backend and prints one line of JSON."""
    import numpy as np

    import keras_strategies as ks

    ks.set_virtual_cpu_devices(len(DEVICES))
    data = load_digits()
    one, two = train(None, data), train(ks.MirroredStrategy(DEVICES), data)
    pairs = [
        pair
        for values in ("weights", "losses")
        for pair in zip(one[values], two[values], strict=True)
    ]
    row = {
        "losses": [one["losses"][-1], two["losses"][-1]],
        "accuracies": [one["accuracy"], two["accuracy"]],
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
    losses = [f"{loss:.6f}" for loss in row["losses"]]
    accuracies = [f"{accuracy:.1%}" for accuracy in row["accuracies"]]
    return (backend, *losses, *accuracies, f"{row['difference']:.0e}")


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
    print(ABOUT)
    rows = []
    for backend in BACKENDS:
        print(f"{backend}: training on one device and on two ...", end=" ", flush=True)
        start = time.perf_counter()
        row = run_backend(backend)
        if row is None:
            return 1
        print(f"{time.perf_counter() - start:.0f} s")
        rows.append(row)
    print()
    print_table(rows)
    print(f"\n{READING}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
