"""Strategies, models and data of the tests of JAX."""

from __future__ import annotations

import contextlib
import functools

import keras
import numpy as np
import pytest
from keras import layers

import keras_strategies as ks

STRATEGIES = {
    "one_device": lambda: ks.OneDeviceStrategy("cpu:1"),
    "mirrored_2": lambda: ks.MirroredStrategy(["cpu:0", "cpu:1"]),
    "mirrored_4": lambda: ks.MirroredStrategy([f"cpu:{i}" for i in range(4)]),
    "central": lambda: ks.CentralStorageStrategy(["cpu:1", "cpu:2"], "cpu:0"),
    "model_2x1": lambda: ks.ModelParallelStrategy(
        "fsdp", ["cpu:0", "cpu:1"], min_shard_bytes=0
    ),
}

on_each_kind = pytest.mark.parametrize("name", ["mirrored_2", "central", "one_device"])


def rows(count: int):
    random = np.random.default_rng(0)
    x = random.normal(size=(count, 6)).astype("float32")
    y = (random.uniform(size=(count, 1)) < 0.5).astype("float32")
    return x, y


class Counting(layers.Layer):
    """Counts how often it is called, which is once per traced program."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.counts = {True: 0, False: 0}

    def call(self, x, training=False):
        self.counts[bool(training)] += 1
        return x


def small_model(optimizer=None, **options):
    """A model that compiles quickly, for what does not depend on its layers."""
    keras.utils.set_random_seed(7)
    model = keras.Sequential(
        [keras.Input((6,)), Counting(name="counting"), layers.Dense(3), layers.Dense(1)]
    )
    optimizer = optimizer or keras.optimizers.SGD(0.1, momentum=0.9)
    model.compile(optimizer, "mse", **options)
    model.get_layer("counting").counts.update({True: 0, False: 0})
    return model


@functools.cache
def trained(name):
    """A strategy and a small model that has been trained; tests go on from there."""
    x, y = rows(22)
    strategy = STRATEGIES[name]()
    with strategy.scope():
        model = small_model()
    model.fit(x, y, batch_size=8, verbose=0)
    return strategy, model


def scope_of(strategy):
    return contextlib.nullcontext() if strategy is None else strategy.scope()


def assert_same(found, expected, tolerance=1e-5):
    assert found.keys() == expected.keys()
    for key in expected:
        for one, other in zip(found[key], expected[key], strict=True):
            scale = max(np.max(np.abs(other), initial=0.0), 1e-2)
            np.testing.assert_allclose(
                one, other, rtol=0, atol=tolerance * scale, err_msg=key
            )
