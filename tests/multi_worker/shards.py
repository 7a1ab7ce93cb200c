"""A model in shards, trained on rows that do not divide."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers
from multi_worker.clusters import dense

BOTH_LAYOUTS = pytest.mark.parametrize(
    ("layout_map", "width"), [("fsdp", 1), ("auto", 2)]
)


def network(strategy, seed=3, dropout: Callable[[], Any] = lambda: layers.Dropout(0.5)):
    return dense(
        *(strategy, 8),
        lambda: [layers.Dense(16, "tanh"), dropout(), layers.Dense(4)],
        lambda: keras.optimizers.Adam(0.01),
        seed,
    )


def rows():
    rng = np.random.default_rng(0)
    return tuple(rng.normal(size=(22, n)).astype("float32") for n in (8, 4))


def fit(model, callbacks=None):
    options = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}
    return model.fit(*rows(), callbacks=callbacks, **options).history["loss"]
