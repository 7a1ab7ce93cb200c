"""Numbers that a layer draws from Python, or counts, are those of one device."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import keras
import numpy as np
import pytest

import keras_strategies as ks

# A program of TensorFlow keeps them as constants, and the last batch, which has fewer
# rows than there are replicas, has a program of its own.
pytestmark = pytest.mark.one_backend("tensorflow")


class Scaled(keras.layers.Layer):
    """Draws and counts in each call, which a program does when it is traced."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def call(self, inputs: Any) -> Any:
        self.calls += 1
        drawn = random.uniform(0.5, 2.0) + np.random.uniform()
        return inputs * drawn * (1 + 0.1 * (self.calls % 3))


def trained(strategy: ks.Strategy | None, losses: int) -> Any:
    keras.utils.set_random_seed(7)
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        x = keras.Input((3,))
        scaled = Scaled()(x)
        model = keras.Model(x, [keras.layers.Dense(1)(scaled) for _ in range(losses)])
        model.compile(keras.optimizers.SGD(0.05), ["mse"] * losses)
    rows = np.random.default_rng(0).normal(size=(11, 3)).astype("float32")
    y = [rows.sum(1, keepdims=True)] * losses
    for _ in range(2):
        model.fit(rows, y, batch_size=5, shuffle=False, verbose=0)
        model.evaluate(rows, y, batch_size=5, verbose=0)
    return model.get_weights(), (random.random(), model.layers[1].calls)


@pytest.mark.filterwarnings("ignore:Layer .* cannot be split")
@pytest.mark.parametrize("losses", [1, 2])
def test_numbers_of_python_are_those_of_one_device(losses: int) -> None:
    expected, after = trained(None, losses)
    found, now = trained(ks.MirroredStrategy(["cpu:0", "cpu:1"]), losses)
    for one, other in zip(expected, found, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-6)
    assert now == after
