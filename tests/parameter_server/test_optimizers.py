"""Keras's optimizers on servers, against one device."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras import optimizers

import keras_strategies as ks
from parameter_server import clusters

pytestmark = pytest.mark.multiprocess

BATCH, STEPS, ROWS = 8, 4, 30

OPTIMIZERS = {
    "adadelta": lambda: optimizers.Adadelta(1.0),
    "adamax": lambda: optimizers.Adamax(0.05),
    "adamw": lambda: optimizers.AdamW(0.05, amsgrad=True),
    "ftrl": lambda: optimizers.Ftrl(0.5, l1_regularization_strength=0.01),
    "lamb": lambda: optimizers.Lamb(0.05),
    "lion": lambda: optimizers.Lion(0.01),
    "muon": lambda: optimizers.Muon(0.05),
    "nadam": lambda: optimizers.Nadam(0.05),
    "rmsprop": lambda: optimizers.RMSprop(0.05, momentum=0.5, centered=True),
    "sgd": lambda: optimizers.SGD(0.1, momentum=0.5, nesterov=True),
}


def build(optimizer):
    keras.utils.set_random_seed(1)
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((3,), dtype="int32"),
            layers.Embedding(ROWS, 4),
            layers.Flatten(),
            layers.Dense(6, "tanh"),
            layers.Dense(1),
        ]
    )
    model.compile(optimizer, "mse")
    return model


def data():
    """Ids that are different within a batch; each batch leaves rows untouched."""
    random = np.random.default_rng(0)
    batches = [random.permutation(ROWS)[: 3 * BATCH] for _ in range(STEPS)]
    x = np.concatenate(batches).reshape(-1, 3).astype("int32")
    return x, random.normal(size=(len(x), 1)).astype("float32")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_does_what_it_does_on_one_device(synchronous, name) -> None:
    x, y = data()
    with synchronous.scope(), clusters.parts(synchronous, 1):
        ours = build(OPTIMIZERS[name]())
    theirs = build(OPTIMIZERS[name]())
    for model in (ours, theirs):
        model.fit(x, y, batch_size=BATCH, epochs=3, shuffle=False, verbose=0)
    for found, expected in zip(ours.variables, theirs.variables, strict=True):
        np.testing.assert_allclose(
            *clusters.values([found, expected]), rtol=2e-4, atol=2e-5
        )


@pytest.mark.parametrize("name", ["lamb", "muon"])
def test_what_needs_whole_variables_does_not_get_parts(synchronous, name) -> None:
    x, y = data()
    with synchronous.scope(), clusters.parts(synchronous, 2):
        model = build(OPTIMIZERS[name]())
    message = f"Optimizer {name.title()} computes with all rows of a variable together"
    with pytest.raises(ks.errors.InvalidArgumentError, match=message):
        model.fit(x, y, batch_size=BATCH, verbose=0)
    # The cluster goes on.
    with synchronous.scope():
        model = build("adam")
    model.fit(x, y, batch_size=BATCH, verbose=0)


def test_an_optimizer_that_cannot_be_cut_is_refused(synchronous) -> None:
    x, y = data()
    with synchronous.scope():
        model = build(optimizers.Adafactor(0.05))
    with pytest.raises(ks.errors.InvalidArgumentError, match="Optimizer Adafactor"):
        model.fit(x, y, batch_size=BATCH, verbose=0)
