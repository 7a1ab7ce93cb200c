"""Models, strategies and comparisons of the tests of the TensorFlow backend."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import keras_strategies as ks


def two():
    return ks.MirroredStrategy(["cpu:0", "cpu:1"])


def four():
    return ks.MirroredStrategy([f"cpu:{i}" for i in range(4)])


def rows(count: int, features: int = 6):
    random = np.random.default_rng(0)
    x = random.normal(size=(count, features)).astype("float32")
    y = (random.uniform(size=(count, 1)) < 0.5).astype("float32")
    weights = random.uniform(0.5, 2.0, size=count).astype("float32")
    return x, y, weights


def small_model(optimizer="sgd", **compile_arguments):
    """A model of few operations, for what does not depend on its layers."""
    hidden = [layers.Dense(3, use_bias=False), layers.BatchNormalization()]
    model = keras.Sequential([keras.Input((6,)), *hidden, layers.Dense(1)])
    model.compile(optimizer, "mse", **compile_arguments)
    return model


def under(strategy, make, train):
    """What `train(model)` returns, and the weights after it, from pinned seeds."""
    keras.utils.set_random_seed(7)
    if strategy is None:
        model = make()
        model.run_eagerly = True
    else:
        with strategy.scope():
            model = make()
    return train(model), model.get_weights()


def assert_close(expected, found, tolerance=1e-5):
    expected, found = keras.tree.flatten(expected), keras.tree.flatten(found)
    assert len(expected) == len(found)
    for a, b in zip(expected, found, strict=True):
        a, b = np.asarray(a, "float64"), np.asarray(b, "float64")
        scale = max(np.abs(a).max(initial=0), 1e-2)
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * scale)


def assert_same(strategy, make, train, tolerance=1e-5):
    assert_close(under(None, make, train), under(strategy, make, train), tolerance)


def fit(count, batch=8, epochs=2):
    """Trains on `count` rows; a last batch of another size needs another program."""

    def train(model):
        x, y, _ = rows(count)
        options = {"batch_size": batch, "epochs": epochs, "shuffle": False}
        return model.fit(x, y, verbose=0, **options).history

    return train


#: The static rows of each traced call of `Rows`, and the replica that made it; layers
#: that change what they hold are not split.
SEEN: list[tuple[int | None, int | None]] = []


@ks.row_wise
class Rows(layers.Layer):
    """Notes its calls, one for each program and replica, in `SEEN`."""

    def call(self, x):
        if tf.executing_eagerly():  # A check whether rows depend on each other.
            return x
        replica = ks.get_replica_context()
        graph = tf.compat.v1.get_default_graph()
        if (replica is not None and replica.is_proof) or graph.name == "operations":
            return x  # Traced for a proof, or for the names of operations.
        on = None if replica is None or not ks.has_strategy() else replica
        SEEN.append((x.shape[0], on and on.replica_id_in_sync_group))
        return x
