"""Loaders of map-style datasets, which count the rows that are read."""

from __future__ import annotations

import random
from typing import Any

import keras
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

# A loader forks its processes. In one with the threads of JAX or TensorFlow that can
# hang, with and without a strategy.
FORKS = [pytest.mark.nightly] * (keras.backend.backend() != "torch")
forks = FORKS[0] if FORKS else lambda test: test
ROWS, WIDTH, BATCH = 23, 3, 5
_random = np.random.default_rng(4)
X = _random.normal(size=(ROWS, WIDTH)).astype("float32")
Y = X.sum(1, keepdims=True)
WEIGHTS = np.linspace(0.5, 2.0, ROWS).astype("float32")


class Rows(Dataset):
    """Rows that depend on their index alone, and which of them have been read."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, i: int) -> Any:
        self.read.append(int(i))
        return X[i], Y[i], WEIGHTS[i]


class Noisy(Rows):
    """Rows with noise of a generator of the process or of the dataset."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind = kind
        self.generator = np.random.default_rng(1)
        self.python = random.Random(2)
        self.seeds = keras.random.SeedGenerator(3)
        self.made: Any = None

    def noise(self, i: int) -> Any:
        if self.kind == "made later" and self.made is None:
            self.made = np.random.default_rng(7)
        draw: Any = {
            "torch": lambda: torch.rand(()),
            "numpy": np.random.rand,
            "python": random.random,
            "generator": self.generator.random,
            "own python": self.python.random,
            "keras": lambda: keras.random.uniform((), seed=self.seeds),
            "keras global": lambda: keras.random.uniform(()),
            "made later": lambda: self.made.random(),
            # Rows of one worker, in the second epoch's batches too.
        }.get(self.kind, lambda: np.random.rand() if i == ROWS - 2 else 0.0)
        return float(draw())

    def __getitem__(self, i: int) -> Any:
        x, y, weight = super().__getitem__(i)
        return x + np.float32(self.noise(i)), y, weight


def loader(dataset: Any, **options: Any) -> Any:
    return DataLoader(dataset, **{"batch_size": BATCH, "shuffle": True, **options})


def dataset_of(kind: str) -> Any:
    return Rows() if kind == "rows" else Noisy(kind)


def draws() -> list[float]:
    """Equal ones follow where the generators of the process have moved alike."""
    return [random.random(), np.random.rand(), float(torch.rand(()))]


def index_of(strategy: Any) -> int:
    return 0 if strategy.workers is None else int(strategy.workers.group.index)
