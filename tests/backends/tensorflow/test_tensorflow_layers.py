"""TensorFlow: layers on replicas, layers that are called unsplit, and gradients."""

from __future__ import annotations

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from backends.tensorflow.tensorflow_training import (
    SEEN,
    Rows,
    assert_close,
    assert_same,
    fit,
    four,
    rows,
    small_model,
    two,
)
from keras import layers, ops

import keras_strategies as ks


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
        # History is compared by the names of outputs.
        gathered = layers.Dense(1, name="gathered")(first)
        reduced = layers.Dense(1, name="reduced")(second)
        model = keras.Model(inputs, [gathered, reduced])
        model.compile(keras.optimizers.SGD(0.1), ["mse", "mse"], run_eagerly=eager)
        return model

    def train(model):
        x, y, _ = rows(11)
        given = {"batch_size": 11, "epochs": 2, "shuffle": False, "verbose": 0}
        return model.fit(x, [y, y], **given).history

    assert_same(two(), make, train)


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
        model = small_model()
    x, y, _ = rows(8)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*cannot be split by rows")
        model.fit(x, y, batch_size=8, verbose=0)


class Gradients(keras.Model):
    """A step that returns its gradients instead of using them."""

    def train_step(self, data):
        x, y, *_ = data
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = ops.mean(ops.square(self(x, training=True) - y))
        self.found = tape.gradient(loss, [*self.trainable_variables, x])
        return {"loss": loss}


def test_gradients_of_the_input_cross_the_replicas():
    x, y, _ = rows(11)

    def make():
        inputs = keras.Input((6,))
        hidden = layers.Dense(8, activation="tanh")(inputs)
        model = Gradients(inputs, layers.Dense(1)(layers.BatchNormalization()(hidden)))
        model.compile(run_eagerly=True)
        return model

    def train(model):
        model.train_on_batch(tf.constant(x), tf.constant(y))
        return [np.asarray(gradient) for gradient in model.found]

    assert_same(four(), make, train)


def test_a_loop_has_more_than_one_gradient():
    """A persistent tape asks the replicas as often as its user asks it."""
    random = np.random.default_rng(1)
    x = random.normal(size=(7, 3, 2)).astype("float32")
    y = x[..., 0]

    class Repeated(keras.Model):
        def train_step(self, data):
            x, y, *_ = data
            with tf.GradientTape(persistent=True) as tape:
                outputs = self(x, training=True)
                losses = [ops.mean(ops.square(outputs - y)), ops.mean(outputs)]
            values = [variable.value for variable in self.trainable_variables]
            found = [tape.gradient(loss, values) for loss in (*losses, losses[0])]
            found = keras.tree.map_structure(tf.convert_to_tensor, found)
            return dict(zip(("first", "second", "again"), found, strict=True))

    def make():
        # The layer with the fewest operations in its loop.
        inputs = keras.Input((3, 2))
        model = Repeated(inputs, layers.SimpleRNN(3)(Rows()(inputs)))
        model.compile()
        return model

    def train(model):
        SEEN.clear()
        logs = model.train_on_batch(x, y, return_dict=True)
        assert_close(logs["first"], logs["again"])
        return logs["first"], logs["second"]

    assert_same(two(), make, train)
    assert any(replica is not None for _, replica in SEEN)


def test_a_layer_that_is_called_in_a_function_of_its_user_is_exact():
    class Wrapped(keras.Model):
        @tf.function
        def forward(self, x):
            return self(x, training=True)

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = ops.mean(ops.square(self.forward(x) - y))
            variables = self.trainable_variables
            self.optimizer.apply(tape.gradient(loss, variables), variables)
            return {"loss": loss}

    def make():
        inputs = keras.Input((6,))
        hidden = layers.BatchNormalization()(layers.Dense(8)(inputs))
        model = Wrapped(inputs, layers.Dense(1)(hidden))
        model.compile(keras.optimizers.SGD(0.1))
        return model

    assert_same(two(), make, fit(18, batch=9))
