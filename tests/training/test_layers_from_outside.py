"""Layers and backbones that were made outside of the scope, in models of a strategy."""

from __future__ import annotations

import contextlib
import functools
import tempfile
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from harness.strategies import STRATEGIES
from harness.strategies import TWO_REPLICAS_BY_DAY as BY_DAY
from keras import layers

import keras_strategies as ks

RNG = np.random.default_rng(0)
# The last batch of 10 has three rows: uneven on two replicas, too few for four.
X = RNG.normal(size=(43, 6)).astype("float32")
Y = X[:, :1] * 2 - X[:, 1:2]
FIT: dict[str, Any] = {"batch_size": 10, "shuffle": False, "verbose": 0}


def scope_of(strategy: Any) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if strategy is None else strategy.scope()


def backbone_of(strategy: Any = None) -> keras.Model:
    """A backbone that was made in the scope of a strategy, or of none."""
    keras.utils.set_random_seed(3)
    with scope_of(strategy):
        backbone = keras.Sequential(
            [
                keras.Input((6,)),
                layers.Dense(8, "tanh"),
                layers.BatchNormalization(),
                layers.Dense(4),
            ]
        )
    return backbone


def model_of(strategy: Any, backbone: keras.Model, trainable: bool) -> keras.Model:
    backbone.trainable = trainable
    keras.utils.set_random_seed(4)
    with scope_of(strategy):
        model = keras.Sequential([keras.Input((6,)), backbone, layers.Dense(1)])
        model.compile("adam", "mse", metrics=["mae"])
    return model


def trained(strategy: Any, backbone: keras.Model, trainable: bool, path: Any) -> Any:
    """What methods of the model and then of the backbone return, and all weights."""
    model = model_of(strategy, backbone, trainable)
    found: dict[str, Any] = {"predicted": model.predict(X, batch_size=10, verbose=0)}
    found |= model.fit(X, Y, epochs=2, validation_data=(X[:7], Y[:7]), **FIT).history
    model.save(path)
    # Outside of the scope, the backbone is a model of plain Keras.
    backbone.trainable = True
    backbone.compile("adam", "mse")
    found["retrained"] = backbone.fit(X, np.tile(Y, 4), **FIT).history["loss"]
    found["evaluated"] = model.evaluate(X, Y, batch_size=10, verbose=0)
    loaded = keras.models.load_model(path)
    found |= {f"saved {i}": v for i, v in enumerate(loaded.get_weights())}
    return found | {f"weight {i}": v for i, v in enumerate(model.get_weights())}


@functools.cache
def trained_alone(trainable: bool) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        return trained(None, backbone_of(), trainable, Path(folder) / "a.keras")


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        np.testing.assert_allclose(found[key], value, rtol=1e-4, atol=2e-5, err_msg=key)


@pytest.mark.one_backend
@pytest.mark.slow(seconds=11)
@BY_DAY
@pytest.mark.parametrize("trainable", [True, False], ids=["trainable", "frozen"])
def test_a_backbone_from_outside_trains_as_on_one_device(
    strategy, trainable, tmp_path
) -> None:
    found = trained(strategy, backbone_of(), trainable, tmp_path / "a.keras")
    assert_same(found, trained_alone(trainable))


@pytest.mark.one_backend
@pytest.mark.slow(seconds=8)
@BY_DAY
@pytest.mark.parametrize("other", ["one_device", "mirrored_4"])
def test_a_backbone_of_another_strategy(strategy, other, tmp_path) -> None:
    backbone = backbone_of(STRATEGIES[other].make())
    found = trained(strategy, backbone, True, tmp_path / "a.keras")
    assert_same(found, trained_alone(True))


def loop_losses(
    strategy: Any, backbone: keras.Model, compiled: bool, rows: int
) -> tuple[list[float], list[Any]]:
    """Losses of a custom loop, then of `fit`, and the weights."""
    model = model_of(strategy, backbone, True)
    strategy = strategy or ks.OneDeviceStrategy("cpu:0")
    with strategy.scope():
        optimizer = keras.optimizers.SGD(0.1)
    loss_of = keras.losses.MeanSquaredError(reduction=None)

    def step(x: Any, y: Any) -> Any:
        def loss() -> Any:
            return ks.compute_average_loss(loss_of(y, model(x, training=False)))

        value, gradients = ks.value_and_grad(loss, model.trainable_variables)()
        optimizer.apply(gradients, model.trainable_variables)
        return value

    def run(x: Any, y: Any) -> Any:
        return strategy.reduce("SUM", strategy.run(step, args=(x, y)))

    run = ks.function(run) if compiled else run
    data = (X[:rows], Y[:rows])
    batches = strategy.experimental_distribute_dataset(data, batch_size=10)
    losses = [float(run(x, y)) for x, y in batches]
    if compiled:
        losses += model.fit(X, Y, **FIT).history["loss"]
    return losses, model.get_weights()


@pytest.mark.one_backend("torch")
@BY_DAY
@pytest.mark.parametrize("compiled", [True, False], ids=["function", "run"])
def test_a_backbone_from_outside_in_a_custom_loop(strategy, compiled) -> None:
    # On JAX, `run` takes uneven batches where a replica is one device.
    rows = 43 if strategy.placement.mesh is None else 40
    expected, weights = loop_losses(None, backbone_of(), compiled, rows)
    found, own = loop_losses(strategy, backbone_of(), compiled, rows)
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    for mine, theirs in zip(own, weights, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=2e-5)
