"""A backbone that was made outside of the scope: workers train the chief's."""

from __future__ import annotations

import contextlib
from typing import Any

import keras
import numpy as np
import pytest
from harness.training import assert_same
from keras import layers

import keras_strategies as ks

JAX = keras.backend.backend() == "jax"
X = np.random.default_rng(0).normal(size=(23, 6)).astype("float32")
Y = X[:, :1] * 2 - X[:, 1:2]


def trained(strategy: Any, is_sharded: bool = False) -> dict[str, Any]:
    is_chief = strategy is None or strategy.workers.is_chief
    keras.utils.set_random_seed(3 if is_chief else 9)
    if is_sharded:
        devices = [str(device) for device in strategy.placement.replicas]
        strategy = ks.ModelParallelStrategy("fsdp", devices, min_shard_bytes=0)
    backbone = keras.Sequential(
        [keras.Input((6,)), layers.Dense(8, "tanh"), layers.BatchNormalization()]
    )
    keras.utils.set_random_seed(4)
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        model = keras.Sequential([keras.Input((6,)), backbone, layers.Dense(1)])
        model.compile("adam", "mse")
    given: dict[str, Any] = {"batch_size": 10, "verbose": 0}
    history = model.fit(X, Y, shuffle=False, epochs=2, **given).history
    return {
        "loss": np.array(history["loss"]),
        "evaluated": np.array(model.evaluate(X, Y, **given)),
        "predicted": model.predict(X, verbose=0),
        **{f"weight {i}": value for i, value in enumerate(model.get_weights())},
    }


@pytest.mark.parametrize(
    "is_sharded", [False, True] if JAX else [False], ids=["mirrored", "fsdp"][: 1 + JAX]
)
@pytest.mark.parametrize("cluster", ["two"], indirect=True, scope="session")
def test_workers_train_the_backbone_of_the_chief(cluster: Any, is_sharded) -> None:
    expected = trained(None)
    for found in cluster(trained, is_sharded):
        assert_same(expected, found, 1e-5, "a worker")
