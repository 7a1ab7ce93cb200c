"""TensorFlow: models that are built by their first batch."""

from __future__ import annotations

import keras
import pytest
from keras import layers, ops

import keras_strategies as ks

if keras.backend.backend() != "tensorflow":
    pytest.skip("tests of the TensorFlow backend", allow_module_level=True)

from backends.tensorflow.tensorflow_training import (
    Rows,
    assert_close,
    assert_same,
    rows,
    two,
)

ks.set_virtual_cpu_devices(4)


class Subclassed(keras.Model):
    def __init__(self, norm=True):
        super().__init__()
        self.hidden = layers.Dense(8, activation="relu")
        self.norm = layers.BatchNormalization()
        self.rows_seen = Rows()
        self.out = layers.Dense(1)

    def call(self, x, training=False):
        return self.out(self.rows_seen(self.norm(self.hidden(x), training=training)))


def test_an_unbuilt_model_loses_no_batch_of_a_generator():
    def make():
        model = Subclassed()
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    def train(model):
        x, y, _ = rows(22)
        batches = ((x[i : i + 8], y[i : i + 8]) for i in range(0, 22, 8))
        return model.fit(batches, verbose=0).history

    assert_same(two(), make, train)


def test_an_unbuilt_model_is_parallel_from_the_first_step():
    with two().scope():
        model = Subclassed()
        model.compile("sgd", "mse")
    x, y, _ = rows(8)
    model.fit(x, y, batch_size=8, verbose=0)
    assert model.rows_seen.seen[-1][1] == 1


def test_a_model_that_only_predicts_is_parallel_from_the_second_batch():
    with two().scope():
        model = Subclassed()
    x, _, _ = rows(24)
    outputs = model.predict(x, batch_size=8, verbose=0)
    assert model.rows_seen.seen[-1][1] == 1
    assert_close(ops.convert_to_numpy(model(x)), outputs)
