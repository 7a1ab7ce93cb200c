"""float8 training: scales and histories, which gradients overwrite, are exact."""

from __future__ import annotations

import contextlib
from typing import Any

import keras
import numpy as np
import pytest
from harness.strategies import TWO_REPLICAS_BY_DAY
from keras import layers, ops

import keras_strategies as ks

# Rows of different sizes, so that the largest value is of one replica.
X = np.random.default_rng(0).normal(size=(10, 5)) * np.linspace(1, 4, 10)[:, None]
X = X.astype("float32")
Y = np.random.default_rng(1).normal(size=(10, 2)).astype("float32")
BATCH = 4


def new_model() -> keras.Model:
    keras.utils.set_random_seed(1)
    policy = "float8_from_float32"
    first = layers.Dense(4, "tanh", dtype=policy)
    last = layers.EinsumDense("ab,bc->ac", 2, bias_axes="c", dtype=policy)
    return keras.Sequential([keras.Input((5,)), first, last])


def fitted(strategy: Any) -> list[np.ndarray]:
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        model = new_model()
        model.compile(keras.optimizers.SGD(0.05), "mse")
    # The last batch has two rows.
    model.fit(X, Y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    return values(model)


def looped(strategy: Any) -> list[np.ndarray]:
    with strategy.scope():
        model = new_model()
        optimizer = keras.optimizers.SGD(0.05)
        optimizer.build(model.trainable_variables)

    def loss(x: Any, y: Any) -> Any:
        return ops.sum((model(x, training=True) - y) ** 2) / BATCH

    def step(x: Any, y: Any) -> None:
        _, gradients = ks.value_and_grad(loss, model.trainable_variables)(x, y)
        optimizer.apply(gradients, model.trainable_variables)

    # Keras's custom gradients of float8 layers need a graph on TensorFlow.
    @ks.function
    def train(x: Any, y: Any) -> None:
        strategy.run(step, args=(x, y))

    pairs = [(X[i : i + BATCH], Y[i : i + BATCH]) for i in (0, 4)]
    for x, y in strategy.experimental_distribute_dataset(pairs):
        train(x, y)
    return values(model)


def values(model: keras.Model) -> list[np.ndarray]:
    return [ops.convert_to_numpy(variable) for variable in model.weights]


def assert_equal(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    assert any(value.shape == (1024,) and value.any() for value in expected)
    # Keras rounds biases to bfloat16, with 7 bits, and so are their gradients, of each
    # replica before the sum. A sum in place of a maximum is wrong by a factor.
    for own, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(own, other, rtol=2**-7, atol=1e-3)


@pytest.mark.one_backend("tensorflow")
@TWO_REPLICAS_BY_DAY
def test_fit_overwrites_as_on_one_device(strategy) -> None:
    assert_equal(fitted(strategy), fitted(None))


@pytest.mark.one_backend
def test_a_custom_loop_overwrites_as_on_one_device(mirrored) -> None:
    assert_equal(looped(mirrored), looped(ks.OneDeviceStrategy("cpu:0")))
