"""Data and small networks that several recipes use."""

from __future__ import annotations

import functools
from typing import Any

import keras
import numpy as np
from harness.data import Data
from keras import layers, ops


def sgd(rate: float = 0.05) -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(rate)


@functools.cache
def _digits() -> tuple[np.ndarray, np.ndarray]:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return (images / 16).astype("float32"), labels.astype("int32")


def digits(rows: int) -> Data:
    """Scikit-learn's handwritten digits, (rows, 8, 8, 1) between 0 and 1."""
    images, labels = _digits()
    return Data(images[:rows].reshape(-1, 8, 8, 1), labels[:rows])


def images_only(rows: int) -> Data:
    return Data(digits(rows).x, None)


def images_twice(rows: int) -> Data:
    """Images that are their own targets."""
    return Data(digits(rows).x, digits(rows).x)


def random_rows(rows: int, *shape: int, seed: int = 0) -> np.ndarray:
    random = np.random.default_rng(seed)
    return random.normal(size=(rows, *shape)).astype("float32")


def stack(shape: tuple[int, ...], *parts: Any, dtype: Any = None) -> keras.Model:
    return keras.Sequential([keras.Input(shape, dtype=dtype), *parts])


def perceptron(*units: int, inputs: int) -> keras.Model:
    """Dense layers, tanh between them."""
    hidden = [layers.Dense(n, activation="tanh") for n in units[:-1]]
    return stack((inputs,), *hidden, layers.Dense(units[-1]))


def convolutional(units: int, norm: bool = True) -> keras.Model:
    """An encoder of digits' images."""
    return stack(
        (8, 8, 1),
        layers.Conv2D(4, 3, strides=2, padding="same"),
        *([layers.BatchNormalization()] if norm else []),
        layers.LeakyReLU(),
        layers.Conv2D(8, 3, strides=2, padding="same"),
        layers.LeakyReLU(),
        layers.Flatten(),
        layers.Dense(units),
    )


def crossentropy() -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def losses_of(labels: Any, logits: Any) -> Any:
    """The cross entropy of each label."""
    of_each = keras.losses.sparse_categorical_crossentropy
    return of_each(labels, logits, from_logits=True)


def matched(similar: Any) -> Any:
    """Cross entropies of each row's own column."""
    return losses_of(ops.arange(ops.shape(similar)[0]), similar)


def ready(model: Any, optimizer: Any = None, loss: Any = None, **given: Any) -> Any:
    """The model, built and compiled."""
    model.built = True
    model.compile(optimizer or sgd(), loss, **given)
    # For all variables: the first step may be that of one player only.
    model.optimizer.build(model.trainable_variables)
    return model
