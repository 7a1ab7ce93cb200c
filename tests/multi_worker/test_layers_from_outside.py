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

TORCH = keras.backend.backend() == "torch"
KINDS = {"mirrored": False}
if keras.backend.backend() != "tensorflow":
    KINDS["fsdp"] = True
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


@pytest.mark.one_backend
@pytest.mark.nightly(unless=["two-mirrored"])
@pytest.mark.parametrize("is_sharded", KINDS.values(), ids=KINDS.keys())
@pytest.mark.parametrize("cluster", ["two"], indirect=True, scope="session")
def test_workers_train_the_backbone_of_the_chief(cluster: Any, is_sharded) -> None:
    expected = trained(None)
    for found in cluster(trained, is_sharded):
        assert_same(expected, found, 1e-5, "a worker")


def trained_adapter(strategy: Any, is_made_outside: bool) -> dict[str, Any]:
    """Adapters of a frozen layer, which are added outside of the scope."""
    scope: Any = contextlib.nullcontext
    if strategy is not None:
        scope = ks.ModelParallelStrategy("fsdp", ["cpu:0"], min_shard_bytes=0).scope
    keras.utils.set_random_seed(3)
    with contextlib.nullcontext() if is_made_outside else scope():
        hidden = layers.Dense(8, "tanh")
        hidden.build((None, 6))
    if is_made_outside:
        hidden.enable_lora(2)
    with scope():
        model = keras.Sequential([keras.Input((6,)), hidden, layers.Dense(1)])
    if not is_made_outside:
        hidden.enable_lora(2)
    model.compile(keras.optimizers.SGD(0.1, 0.9), "mse")
    given: dict[str, Any] = {"batch_size": 10, "verbose": 0}
    history = model.fit(X, Y, shuffle=False, epochs=2, **given).history
    found = {f"weight {i}": value for i, value in enumerate(model.get_weights())}
    if strategy is not None:
        values = [variable.value for variable in model.trainable_variables]
        parameters = [p for p in model.parameters() if p.requires_grad]
        assert {id(p) for p in parameters} == {id(value) for value in values}
        assert [type(value).__name__ for value in values[1:3]] == ["DTensor"] * 2
    return {"loss": np.array(history["loss"]), **found}


@pytest.mark.skipif(not TORCH, reason="parameters are those of Torch")
@pytest.mark.parametrize("is_made_outside", [True, False])
@pytest.mark.parametrize("cluster", ["two"], indirect=True, scope="session")
def test_adapters_from_outside_are_in_shards(cluster: Any, is_made_outside) -> None:
    expected = trained_adapter(None, is_made_outside)
    for found in cluster(trained_adapter, is_made_outside):
        assert_same(expected, found, 1e-5, "a worker")
