"""MNIST under `MirroredStrategy`; scikit-learn's digits where there is no network.

KERAS_BACKEND=torch python mirrored_mnist.py --devices gpu:0,gpu:1
"""

from __future__ import annotations

import argparse

import keras
import numpy as np
from keras import layers

import keras_strategies as ks


def load_data():
    """Images of shape (rows, size, size, 1) between 0 and 1, and their labels."""
    try:
        (x, y), (test_x, test_y) = keras.datasets.mnist.load_data()
    except Exception as error:
        reason = str(error).splitlines()[0]
        print(f"MNIST cannot be loaded ({reason}); using scikit-learn's digits.")
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split

        images, labels = load_digits(return_X_y=True)
        images = images.reshape(-1, 8, 8) * (255 / 16)
        x, test_x, y, test_y = train_test_split(
            images, labels, test_size=360, random_state=0
        )

    def scaled(images):
        return np.asarray(images, "float32")[..., None] / 255

    return (scaled(x), y), (scaled(test_x), test_y)


def build_model(size: int) -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((size, size, 1)),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.BatchNormalization(momentum=0.9),
            layers.MaxPooling2D(),
            layers.Conv2D(64, 3, padding="same", activation="relu"),
            layers.GlobalAveragePooling2D(),
            layers.Dropout(0.2),
            layers.Dense(10),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", help="such as gpu:0,gpu:1 or cpu:0,cpu:1")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=64, help="the global batch")
    options = parser.parse_args()

    devices = options.devices.split(",") if options.devices else None
    strategy = ks.MirroredStrategy(devices)
    print(f"{strategy!r} with the backend {keras.backend.backend()}")

    keras.utils.set_random_seed(0)
    (x, y), (test_x, test_y) = load_data()
    with strategy.scope():
        model = build_model(x.shape[1])
        model.compile(
            optimizer=keras.optimizers.Adam(3e-3),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    model.fit(x, y, batch_size=options.batch_size, epochs=options.epochs, verbose=2)
    _, accuracy = model.evaluate(test_x, test_y, verbose=0)
    print(f"test accuracy: {accuracy:.4f}")


if __name__ == "__main__":
    main()
