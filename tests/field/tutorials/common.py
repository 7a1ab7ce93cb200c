"""Data, and how scripts say what they have found."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
from keras import layers


def load_digits() -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Scikit-learn's digits in two parts, each images (rows, 8, 8, 1) and labels."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype("float32").reshape(-1, 8, 8, 1)
    labels = labels.astype("int32")
    return (images[:500], labels[:500]), (images[500:805], labels[500:805])


def digits_model(
    filters: int = 8, hidden: int = 16, pooled: bool = True, penalty: Any = None
) -> keras.Model:
    """A convolution and two dense layers for the digits' images."""
    options = {"activation": "relu", "kernel_regularizer": penalty}
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(filters, 3, **options),
            *([layers.MaxPooling2D()] if pooled else []),
            layers.Flatten(),
            layers.Dense(hidden, **options),
            layers.Dense(10),
        ]
    )


def compile_digits_model(model: keras.Model, optimizer: Any) -> None:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])


def task_index() -> int:
    """The number of the worker, which TF_CONFIG says; 0 without it."""
    config = json.loads(os.environ.get("TF_CONFIG") or "{}")
    return int(config.get("task", {"index": 0})["index"])


def folder() -> Path:
    """The folder for what a script writes, its first argument."""
    return Path(sys.argv[1])


def largest_difference(expected: list[Any], found: list[Any]) -> float:
    """Of arrays, relative to the largest magnitude of each."""
    gaps = [
        np.abs(np.subtract(a, b)).max() / max(np.abs(a).max(), 1e-2)
        for a, b in zip(expected, found, strict=True)
    ]
    return float(max(gaps))


def report(**numbers: Any) -> None:
    """Prints the numbers that the test looks at."""
    print("RESULT " + json.dumps(numbers), flush=True)
