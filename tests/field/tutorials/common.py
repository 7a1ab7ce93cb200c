"""Data, and how scripts say what they have found."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np


def load_digits() -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Scikit-learn's digits in two parts, each images (rows, 8, 8, 1) and labels."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype("float32").reshape(-1, 8, 8, 1)
    labels = labels.astype("int32")
    return (images[:500], labels[:500]), (images[500:805], labels[500:805])


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
