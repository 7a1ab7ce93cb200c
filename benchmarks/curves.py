"""Draw `curves.png`: a batch over two devices, and the loss curves of both runs.

    python benchmarks/curves.py

Each backend trains the digits in a process of its own, on one device and on two
replicas, from the same initial weights. The last batch is uneven: 1,437 rows in
batches of 64 leave 29.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from measuring import BACKENDS, run_script

MARKERS = {"jax": "o", "torch": "s", "tensorflow": "^"}
BATCH_SIZE = 64
EPOCHS = 12


def build_model() -> Any:
    """A small network with initial weights of NumPy, equal on each backend."""
    import keras
    import numpy as np
    from keras import layers

    model = keras.Sequential(
        [
            keras.Input((64,)),
            layers.Dense(64, activation="tanh"),
            layers.BatchNormalization(),
            layers.Dense(10),
        ]
    )
    generator = np.random.default_rng(0)
    for layer in (model.layers[0], model.layers[-1]):
        kernel, bias = layer.get_weights()
        scale = kernel.shape[0] ** -0.5
        layer.set_weights([generator.normal(0, scale, kernel.shape), bias])
    model.compile(
        optimizer=keras.optimizers.SGD(0.02),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return model


def train() -> dict[str, list[float]]:
    """The losses of each epoch, on one device and on two replicas."""
    from sklearn.datasets import load_digits

    import keras_strategies as ks

    ks.set_virtual_cpu_devices(2)
    images, labels = load_digits(return_X_y=True)
    x, y = (images[:1437] / 16).astype("float32"), labels[:1437].astype("int32")
    runs = {
        "one": ks.OneDeviceStrategy("cpu:0"),
        # A model as small as this would otherwise not be split on Torch.
        "two": ks.MirroredStrategy(["cpu:0", "cpu:1"]),
    }
    losses = {}
    for name, strategy in runs.items():
        with strategy.scope():
            model = build_model()
        history = model.fit(
            x, y, batch_size=BATCH_SIZE, epochs=EPOCHS, shuffle=False, verbose=0
        )
        losses[name] = history.history["loss"]
    return losses


def train_on(backend: str) -> dict[str, list[float]]:
    """`train` in a process of its own."""
    return run_script(__file__, "--train", backend=backend)


def draw_split(axis: Any) -> None:
    """A batch of 29 rows, its parts on two devices, and what comes out."""
    from matplotlib.patches import Rectangle

    axis.set(xlim=(0, 12), ylim=(0, 10))
    axis.axis("off")
    boxes = (
        (0.2, 2, 2.6, 6, "global batch\n29 rows", "0.9"),
        (4.7, 5.4, 2.6, 3.6, "device 0\n15 rows", "#9ecae1"),
        (4.7, 1, 2.6, 3.6, "device 1\n14 rows", "#fdae6b"),
        (9.2, 2, 2.6, 6, "one loss,\none update", "0.9"),
    )
    for left, bottom, width, height, text, color in boxes:
        box = Rectangle((left, bottom), width, height, facecolor=color, edgecolor="k")
        axis.add_patch(box)
        centre = (left + width / 2, bottom + height / 2)
        axis.text(*centre, text, ha="center", va="center", fontsize=9)
    arrow = {"arrowstyle": "->", "lw": 1.2}
    for height in (7.2, 2.8):
        axis.annotate("", (4.7, height), (2.8, 5), arrowprops=arrow)
        axis.annotate("", (9.2, 5), (7.3, height), arrowprops=arrow)


def draw(results: dict[str, dict[str, list[float]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(9, 3.2), width_ratios=(1, 1.25)
    )
    draw_split(left)
    epochs = range(1, EPOCHS + 1)
    reference = next(iter(results.values()))["one"]
    right.plot(epochs, reference, color="0.75", lw=5, label="one device")
    gap = 0.0
    for i, (backend, losses) in enumerate(results.items()):
        pairs = zip(losses["one"], losses["two"], strict=True)
        gap = max(gap, *(abs(a - b) / a for a, b in pairs))
        shown = slice(i, None, len(results))
        label = f"two devices, {backend}"
        right.plot(epochs[shown], losses["two"][shown], MARKERS[backend], label=label)
    right.set(xlabel="epoch", ylabel="training loss", ylim=(0, None))
    right.set_title(f"largest relative difference: {gap:.0e}", fontsize=9)
    right.legend(fontsize=8, frameon=False)
    right.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    print(f"largest relative difference: {gap:.2g}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    if parser.parse_args().train:
        print(json.dumps(train()))
        return
    results = {backend: train_on(backend) for backend in BACKENDS}
    draw(results, Path(__file__).parents[1] / "docs" / "img" / "curves.png")


if __name__ == "__main__":
    main()
