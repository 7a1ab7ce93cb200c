"""Recurrent layers with dropout: replicas of one process have masks of their own."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

if keras.backend.backend() == "jax":
    pytest.skip("replicas of fit are one program on JAX", allow_module_level=True)

X = np.ones((9, 6, 4), "float32")
Y = np.random.default_rng(1).normal(size=(9, 1)).astype("float32")


def convolutional(**options: Any) -> Any:
    return keras.Sequential(
        [layers.Reshape((6, 4, 1)), layers.ConvLSTM1D(2, 2, **options)]
    )


@pytest.mark.one_backend("torch", "tensorflow")
@pytest.mark.nightly(unless=["SimpleRNN"])
@pytest.mark.parametrize(
    "kind",
    [layers.SimpleRNN, layers.GRU, layers.LSTM, convolutional],
    ids=["SimpleRNN", "GRU", "LSTM", "ConvLSTM1D"],
)
def test_uneven_rows_train(mirrored, kind: Any) -> None:
    """A mask of the other replica has another number of rows."""
    with mirrored.scope():
        recurrent = (
            convolutional(dropout=0.3, recurrent_dropout=0.2)
            if kind is convolutional
            else kind(4, dropout=0.3, recurrent_dropout=0.2)
        )
        model = keras.Sequential(
            [keras.Input((6, 4)), recurrent, layers.Flatten(), layers.Dense(1)]
        )
        model.compile("sgd", "mse")
    history = model.fit(X, Y, batch_size=5, epochs=3, verbose=0).history
    assert np.isfinite(history["loss"]).all()


def test_replicas_have_different_masks(mirrored) -> None:
    """With a mask that is shared, equal inputs of replicas have equal outputs."""
    found = []

    class Recorded(keras.losses.Loss):
        def call(self, y: Any, outputs: Any) -> Any:
            found.append(outputs)
            return keras.ops.sum(outputs**2, axis=-1)

    with mirrored.scope():
        layer = layers.SimpleRNN(4, dropout=0.5)
        model = keras.Sequential([keras.Input((6, 32)), layer])
        model.compile("sgd", Recorded(), run_eagerly=True)
    model.train_on_batch(np.ones((8, 6, 32)), np.zeros((8, 4)))
    outputs = keras.ops.convert_to_numpy(found[-1])
    assert len({tuple(row) for row in outputs.round(5)}) == 8
