"""`keras.callbacks.OrbaxCheckpoint`: what it saves goes on under every strategy."""

from __future__ import annotations

import functools

import keras
import numpy as np
import pytest
from harness.strategies import STRATEGIES
from harness.training import assert_arrays
from keras import layers

pytest.importorskip("orbax.checkpoint")
pytestmark = [
    pytest.mark.one_backend("jax"),
    pytest.mark.skipif(
        not hasattr(keras.callbacks, "OrbaxCheckpoint"),
        reason="this Keras has no OrbaxCheckpoint",
    ),
]


def made(strategy, sequential=True, units=16):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        stack = [
            layers.Dense(units, "tanh"),
            layers.BatchNormalization(),
            layers.Dropout(0.5, seed=1),
            layers.Dense(4),
        ]
        inputs = keras.Input((8,))
        if sequential:
            model = keras.Sequential([inputs, *stack])
        else:
            outputs = inputs
            for layer in stack:
                outputs = layer(outputs)
            model = keras.Model(inputs, outputs)
        model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    return model


def fit(model, epochs=2, callbacks=None):
    random = np.random.default_rng(0)
    x, y = (random.normal(size=(22, n)).astype("float32") for n in (8, 4))
    arguments = {"batch_size": 8, "shuffle": False, "verbose": 0}
    history = model.fit(x, y, epochs=epochs, callbacks=callbacks, **arguments)
    return history.history["loss"]


@functools.cache
def uninterrupted(name: str, sequential: bool = True) -> list[float]:
    """The losses of four epochs; on JAX every strategy draws the same masks."""
    return fit(made(STRATEGIES[name].make(), sequential), epochs=4)


@pytest.mark.slow(seconds=8)
@pytest.mark.nightly(unless=["load_model-mirrored_2-True", "*s-model_2x2-True"])
@pytest.mark.parametrize("sequential", [True, False])
@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("how", ["load_model", "load_weights"])
def test_training_goes_on(name, sequential, how, tmp_path) -> None:
    strategy = STRATEGIES[name].make()
    # Layers without names have other numbers in each model of a process.
    model = made(strategy, sequential)
    saver = keras.callbacks.OrbaxCheckpoint(str(tmp_path), save_on_background=False)
    losses = fit(model, callbacks=[saver])
    if how == "load_model":
        with strategy.scope():
            model = keras.saving.load_model(tmp_path)
    else:
        model = made(strategy, sequential)
        model.load_weights(tmp_path)
    same = "one_device" if keras.backend.backend() == "jax" else name
    expected = uninterrupted(same, sequential)
    np.testing.assert_allclose(losses + fit(model), expected, rtol=1e-4)


def test_a_checkpoint_of_another_model_is_an_error(mirrored, tmp_path) -> None:
    saver = keras.callbacks.OrbaxCheckpoint(str(tmp_path), save_on_background=False)
    fit(made(mirrored), callbacks=[saver])
    model = made(mirrored, units=12)
    before = model.get_weights()
    with pytest.raises(ValueError, match="are not those of the model"):
        model.load_weights(tmp_path)
    assert_arrays(model.get_weights(), before)
