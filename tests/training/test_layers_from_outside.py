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
        hidden = [layers.Dense(8, "tanh"), layers.BatchNormalization()]
        return keras.Sequential([keras.Input((6,)), *hidden, layers.Dense(4)])


def trained(strategy: Any, backbone: keras.Model, trainable: bool, path: Any) -> Any:
    """What methods of the model and then of the backbone return, and all weights."""
    backbone.trainable = trainable
    keras.utils.set_random_seed(4)
    with scope_of(strategy):
        model = keras.Sequential([keras.Input((6,)), backbone, layers.Dense(1)])
        model.compile("adam", "mse", metrics=["mae"])
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
def test_a_backbone_from_outside_trains_as_on_one_device(strategy, trainable, tmp_path):
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
