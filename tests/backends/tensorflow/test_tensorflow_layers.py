"""TensorFlow: layers on replicas, and layers that are called unsplit."""

from __future__ import annotations

import warnings

import keras
import pytest
from keras import layers, ops

import keras_strategies as ks

if keras.backend.backend() != "tensorflow":
    pytest.skip("tests of the TensorFlow backend", allow_module_level=True)

import tensorflow as tf
from backends.tensorflow.tensorflow_training import assert_same, rows, two

ks.set_virtual_cpu_devices(4)


# --- Collectives in layers ----------------------------------------------------


class Center(layers.Layer):
    """Subtracts the mean of the global batch, found in one way or another."""

    def __init__(self, way):
        super().__init__()
        self.way = way

    def call(self, x):
        replica = ks.get_replica_context() if ks.has_strategy() else None
        if replica is None:
            return x - ops.mean(x, 0)
        if self.way == "gather":
            return x - ops.mean(replica.all_gather(x, axis=0), 0)
        count = ops.cast(ops.shape(x)[0], x.dtype)
        total, rows = replica.all_reduce("sum", (ops.sum(x, 0), count))
        return x - total / rows


@pytest.mark.nightly(unless=["True"])
@pytest.mark.parametrize("eager", [False, True])
def test_collectives_in_layers_have_gradients(eager):
    def make():
        inputs = keras.Input((6,))
        first = Center("gather")(layers.Dense(5, activation="tanh")(inputs))
        second = Center("reduce")(layers.Dense(5, activation="tanh")(inputs))
        outputs = [layers.Dense(1)(first), layers.Dense(1)(second)]
        model = keras.Model(inputs, outputs)
        model.compile(keras.optimizers.SGD(0.1), ["mse", "mse"], run_eagerly=eager)
        return model

    def train(model):
        x, y, _ = rows(11)
        given = {"batch_size": 11, "epochs": 2, "shuffle": False, "verbose": 0}
        return model.fit(x, [y, y], **given).history

    assert_same(two(), make, train)


# --- What cannot be split is called whole -------------------------------------


def test_a_layer_with_variables_of_tensorflow_is_exact():
    class Foreign(layers.Layer):
        def __init__(self):
            super().__init__()
            self.scale = tf.Variable(2.0)
            self.calls = tf.Variable(0, trainable=False)

        def call(self, x):
            self.calls.assign_add(1)
            return x * self.scale

    with two().scope():
        foreign = Foreign()
        model = keras.Sequential([keras.Input((6,)), foreign, layers.Dense(1)])
        model.compile("sgd", "mse")
    x, y, _ = rows(16)
    with pytest.warns(UserWarning, match="variables or modules of TensorFlow"):
        model.fit(x, y, batch_size=8, epochs=2, verbose=0)
    assert foreign.calls.numpy() == 4


def test_batch_normalization_is_split_over_replicas():
    """With the statistics of one replica it would be exact, too, but unsplit."""
    with two().scope():
        model = keras.Sequential(
            [keras.Input((6,)), layers.BatchNormalization(), layers.Dense(1)]
        )
        model.compile("sgd", "mse")
    x, y, _ = rows(8)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*cannot be split by rows")
        model.fit(x, y, batch_size=8, verbose=0)


# --- Keras inside replicas ----------------------------------------------------
