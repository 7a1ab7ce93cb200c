"""A model and batches of uneven rows for loops in Torch's own words."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import keras
import numpy as np
import torch
from keras import layers
from torch.nn import functional

ROWS = (7, 8, 5, 3)


def batches() -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(3)
    return [
        (rng.normal(size=(n, 3)).astype("float32"), rng.integers(0, 4, n)) for n in ROWS
    ]


def distributed(strategy: Any, array: np.ndarray) -> Any:
    """Rows of each replica, of all workers; not as many on each."""
    count = strategy.num_replicas_in_sync
    ends = np.linspace(0, len(array), count + 1).round().astype(int)

    def own(context: Any, array: np.ndarray) -> Any:
        i = context.replica_id_in_sync_group
        return torch.from_numpy(array[ends[i] : ends[i + 1]])

    return strategy.experimental_distribute_values_from_function(
        functools.partial(own, array=array)
    )


def make_model(strategy: Any) -> Any:
    with strategy.scope() if strategy else contextlib.nullcontext():
        keras.utils.set_random_seed(1)
        return keras.Sequential(
            [
                keras.Input((3,)),
                # Gradients are in the order of the names.
                layers.Dense(5, activation="tanh", name="hidden"),
                layers.BatchNormalization(name="normalized"),
                layers.Dense(4, name="outputs"),
            ]
        )


def loss_of(model: Any, x: Any, y: Any, rows: int) -> Any:
    return functional.cross_entropy(model(x, training=True), y, reduction="sum") / rows


def gradients(model: Any) -> list[np.ndarray]:
    """The gradients of parameters, by name; empty ones for None."""
    named = dict(model.named_parameters())
    found = [named[name].grad for name in sorted(named)]
    return [
        np.zeros(0) if each is None else keras.ops.convert_to_numpy(each).copy()
        for each in found
    ]
