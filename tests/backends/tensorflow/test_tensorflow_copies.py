"""Replicas on TensorFlow with operations copied from another replica."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import keras_strategies as ks


class Normalized(layers.Layer):
    """Normalizes batches twice: replicas exchange statistics, and their gradients.

    It counts its calls in a variable.
    """

    def __init__(self, between=None, then=None):
        super().__init__()
        self.between, self.then = as_layer(between), as_layer(then)

    def build(self, shape):
        self.norms = [layers.BatchNormalization() for _ in range(2)]
        for norm in self.norms:
            norm.build((*shape[:-1], 3))
        self.kernel = self.add_weight(shape=(shape[-1], 3), name="kernel")
        self.calls = self.add_weight((), "zeros", trainable=False, name="calls")

    def call(self, x, training=None):
        x = self.between(self.norms[0](x @ self.kernel, training=training))
        self.calls.assign_add(1.0)
        return self.then(self.norms[1](ops.tanh(x), training=training))


@ks.row_wise
class Function(layers.Layer):
    """Calls a function with code of TensorFlow."""

    def __init__(self, function, **arguments):
        super().__init__(**arguments)
        self.function = function

    def call(self, x):
        return self.function(x)


def scaled_gradient(x):
    """A custom gradient that refers to a tensor of its own call."""
    factor = ops.exp(x)

    @tf.custom_gradient
    def identity(x):
        return tf.identity(x), lambda gradient: gradient * factor

    return identity(x)


@tf.function(reduce_retracing=True)
def in_a_program(x):
    return ops.sin(x) * x


def as_layer(function):
    if function is None:
        return lambda x: x
    return function if function is centered else Function(function)


def centered(x):
    """Subtracts the mean of all replicas' rows, by a collective of the user's."""
    replica = ks.get_replica_context()
    every = x if replica is None else replica.all_gather(x, axis=0)
    return ops.square(x - ops.mean(every, axis=0))


def normalized(strategy, between, then, eager=False):
    """Weights after two steps on 11 rows."""
    random = np.random.default_rng(0)
    x = random.normal(size=(11, 4)).astype("float32")
    keras.utils.set_random_seed(3)
    with strategy.scope():
        layer = Normalized(between, then)
        model = keras.Sequential([keras.Input((4,)), layer])
        # With one step, Keras 3.16 has programs for 11 rows, which no copies have.
        steps = {} if eager else {"steps_per_execution": 2}
        model.compile(keras.optimizers.SGD(0.5), "mse", run_eagerly=eager, **steps)
    data = tf.data.Dataset.from_tensor_slices((x, x[:, :3])).batch(11).repeat(2)
    model.fit(data, epochs=1, verbose=0)
    return model.get_weights()


@pytest.mark.nightly(unless=["scaled_gradient-centered-2"])
@pytest.mark.parametrize(
    ("between", "then", "count"),
    [
        (scaled_gradient, centered, 2),
        # The second replica is traced after what it has exchanged as a copy.
        (None, in_a_program, 2),
        (scaled_gradient, in_a_program, 4),
    ],
)
def test_copies_exchange_statistics(between, then, count):
    strategy = ks.MirroredStrategy([f"cpu:{i}" for i in range(count)])
    found = normalized(strategy, between, then)
    one = normalized(ks.OneDeviceStrategy("cpu:0"), between, then, eager=True)
    for own, expected in zip(found, one, strict=True):
        np.testing.assert_allclose(own, expected, rtol=1e-5, atol=2e-6)
