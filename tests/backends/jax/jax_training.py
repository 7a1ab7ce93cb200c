"""Strategies, models and data of the tests of JAX."""

from __future__ import annotations

import contextlib
import functools

import keras
import numpy as np
import pytest
from keras import layers

import keras_strategies as ks

# mirrored_2: a step is one program over a mesh; mirrored_default: it is on one device,
# since the models are small; central: it is two programs, with an update on a device of
# its own; one_device: Keras's own program on another device than the default one.
# mirrored_4 runs what mirrored_2 runs, and central_overlapping what central runs, with
# arrays that are on the parameter device already.
STRATEGIES = {
    "one_device": lambda: ks.OneDeviceStrategy("cpu:1"),
    "mirrored_2": lambda: ks.MirroredStrategy(["cpu:0", "cpu:1"]),
    "mirrored_4": lambda: ks.MirroredStrategy([f"cpu:{i}" for i in range(4)]),
    "mirrored_default": lambda: ks.MirroredStrategy(["cpu:1", "cpu:2"]),
    "central": lambda: ks.CentralStorageStrategy(["cpu:1", "cpu:2"], "cpu:0"),
    "central_overlapping": lambda: ks.CentralStorageStrategy(
        ["cpu:0", "cpu:1"], "cpu:0"
    ),
}


def on(*names: str):
    """Parametrizes with these strategies; with the others in the nightly run."""
    others = [n for n in STRATEGIES if n not in names]
    nightly = [pytest.param(n, marks=pytest.mark.nightly) for n in others]
    return pytest.mark.parametrize("name", [*names, *nightly])


on_each_kind = on("mirrored_2", "central", "one_device")


def rows(count: int):
    random = np.random.default_rng(0)
    x = random.normal(size=(count, 6)).astype("float32")
    y = (random.uniform(size=(count, 1)) < 0.5).astype("float32")
    weights = random.uniform(0.5, 2.0, size=count).astype("float32")
    return x, y, weights


class Counting(layers.Layer):
    """Counts how often it is called, which is once per traced program."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.counts = {True: 0, False: 0}

    def call(self, x, training=False):
        self.counts[bool(training)] += 1
        return x


def make_model(optimizer=None, **compile_arguments):
    keras.utils.set_random_seed(7)
    model = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(8, activation="relu", kernel_regularizer="l2"),
            layers.BatchNormalization(),
            Counting(name="counting"),
            layers.Dense(1, activation="sigmoid"),
        ]
    )
    model.compile(
        optimizer or keras.optimizers.SGD(0.1, momentum=0.9),
        "binary_crossentropy",
        metrics=["accuracy"],
        weighted_metrics=[keras.metrics.AUC(num_thresholds=20, name="auc")],
        **compile_arguments,
    )
    model.get_layer("counting").counts.update({True: 0, False: 0})
    return model


def small_model(optimizer=None):
    """A model that compiles quickly, for what does not depend on its layers."""
    keras.utils.set_random_seed(7)
    model = keras.Sequential(
        [keras.Input((6,)), Counting(name="counting"), layers.Dense(3), layers.Dense(1)]
    )
    model.compile(optimizer or keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    model.get_layer("counting").counts.update({True: 0, False: 0})
    return model


@functools.cache
def trained(name):
    """A strategy and a small model that has been trained; tests go on from there."""
    x, y, _ = rows(22)
    strategy = STRATEGIES[name]()
    with strategy.scope():
        model = small_model()
    model.fit(x, y, batch_size=8, verbose=0)
    return strategy, model


def scope_of(strategy):
    return contextlib.nullcontext() if strategy is None else strategy.scope()


@functools.cache
def alone(count=22, optimizer=lambda: None, **compile_arguments):
    """What `train` gives without a strategy."""
    return train(None, count, optimizer, **compile_arguments)


def train(strategy, count=22, optimizer=lambda: None, **compile_arguments):
    x, y, weights = rows(count)
    with scope_of(strategy):
        model = make_model(optimizer(), **compile_arguments)
    history = model.fit(
        x,
        y,
        sample_weight=weights,
        validation_data=(x[:9], y[:9], weights[:9]),
        batch_size=8,
        epochs=3,
        shuffle=False,
        verbose=0,
    )
    results = {
        "weights": model.get_weights(),
        "history": [history.history[key] for key in sorted(history.history)],
        "evaluate": model.evaluate(x, y, 8, 0, sample_weight=weights),
        "predict": [model.predict(x, 8, 0)],
    }
    if model.steps_per_execution == 1:  # Keras 3.16 takes rows for steps otherwise.
        results["predict_on_batch"] = [model.predict_on_batch(x)]
    return results


def assert_same(found, expected, tolerance=1e-5):
    assert found.keys() == expected.keys()
    for key in expected:
        for one, other in zip(found[key], expected[key], strict=True):
            scale = max(np.max(np.abs(other), initial=0.0), 1e-2)
            np.testing.assert_allclose(
                one, other, rtol=0, atol=tolerance * scale, err_msg=key
            )
