"""Layers in `run` on JAX by which a replica's results depend on its other rows."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

import keras_strategies as ks

pytestmark = pytest.mark.skipif(
    keras.backend.backend() != "jax", reason="checked where replicas are traced"
)
X = np.random.default_rng(0).normal(size=(7, 3)).astype("float32")
DEVICES = ["cpu:0", "cpu:1"]
NAMED = "depends on which rows a replica has"


class Center(layers.Layer):
    def call(self, x: Any) -> Any:
        return x - ops.mean(x, axis=0)


class CenterOfAll(layers.Layer):
    """Exact where replicas have equally many rows."""

    def call(self, x: Any) -> Any:
        mean = ops.mean(x, axis=0)
        replica = ks.get_replica_context()
        return x - (mean if replica is None else replica.all_reduce("MEAN", mean))


@ks.row_wise
class Declared(layers.Layer):
    def call(self, x: Any) -> Any:
        return x - ops.mean(x, axis=0) * 0.0


def results(strategy: Any, make: Any, rows: int, batch: int, compiled: bool) -> Any:
    """The outputs of a model with the layer, of all batches."""
    with strategy.scope():
        keras.utils.set_random_seed(1)
        inputs = keras.Input((3,))
        x = layers.Dense(4)(inputs)
        # Of uneven rows it is refused.
        x = x if rows % 2 else layers.BatchNormalization()(x)
        model = keras.Model(inputs, layers.Dense(2)(make()(x)))

    def step(x: Any) -> Any:
        return strategy.run(lambda x: model(x, training=True), args=(x,))

    step = ks.function(step) if compiled else step
    batches = strategy.experimental_distribute_dataset(X[:rows], batch_size=batch)
    return np.concatenate([np.asarray(strategy.gather(step(x), 0)) for x in batches])


def check(make: Any, rows: int, batch: int, compiled: bool = False) -> list[str]:
    """The warnings; fails unless these say whether one device computes the same."""
    alone = ks.OneDeviceStrategy("cpu:0")
    expected = results(alone, make, rows, batch, compiled)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = results(ks.MirroredStrategy(DEVICES), make, rows, batch, compiled)
    texts = [str(w.message) for w in caught if NAMED in str(w.message)]
    assert np.allclose(expected, found, atol=1e-5) == (not texts)
    return texts


# Of 7 rows replicas have 4 and 3.
@pytest.mark.parametrize("compiled", [False, True])
def test_layer_and_operation_are_named_once(compiled: bool) -> None:
    (text,) = check(lambda: Center(name="center"), 7, 7, compiled)
    assert "Layer 'functional" in text and "'Subtract' (in layer 'center'" in text
    assert "test_mixed_rows.py:" in text and "of 2 replicas" in text


@pytest.mark.parametrize("make", [CenterOfAll, Declared, lambda: layers.Dropout(0.5)])
def test_others_are_not_named(make: Callable[[], Any]) -> None:
    assert not check(make, 4, 4)
