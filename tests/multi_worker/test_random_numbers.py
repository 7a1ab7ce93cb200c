"""Random numbers of several workers' rows are those of one device."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras import layers, ops

import keras_strategies as ks

X = np.random.default_rng(3).normal(size=(20, 4)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


class Noisy(layers.Layer):
    """Draws for each row, for all rows together, and twice for each row."""

    def __init__(self):
        super().__init__()
        self.seed = keras.random.SeedGenerator(4)

    def call(self, x, training=False):
        if not training:
            return x
        rows = ops.shape(x)[0]
        shared = keras.random.normal((3, 4), seed=self.seed)
        twice = keras.random.uniform((2 * rows, 4), seed=self.seed)
        twice = ops.sum(ops.reshape(twice, (-1, 2, 4)), axis=1)
        return x + 0.1 * (twice + ops.sum(shared, axis=0))


def fitted(strategy):
    """Losses and weights of two epochs with batches of 7, 7 and 6 rows."""
    keras.utils.set_random_seed(5)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((4,)),
                layers.Dense(6, activation="tanh"),
                layers.Dropout(0.4),
                layers.GaussianNoise(0.3, seed=2),
                layers.Dense(4),
                Noisy(),
                layers.Dense(1),
            ]
        )
        model.compile(keras.optimizers.SGD(0.05), "mse")
    history = model.fit(X, Y, batch_size=7, epochs=2, shuffle=False, verbose=0)
    weights = [ops.convert_to_numpy(each) for each in model.trainable_variables]
    return [*map(np.asarray, history.history["loss"]), *weights]


def drawn_in_run(strategy, sizes):
    """What the replicas of this worker draw, for so many rows each."""
    rows = strategy.experimental_distribute_values_from_function(
        lambda context: ops.ones((sizes[context.replica_id_in_sync_group], 3))
    )
    with strategy.scope():
        layer, seed = layers.Dropout(0.5), keras.random.SeedGenerator(3)

    def fn(x):
        return layer(x, training=True) + keras.random.normal(ops.shape(x), seed=seed)

    keras.utils.set_random_seed(7)
    found = [strategy.run(fn, args=(rows,)) for _ in range(2)]
    return [
        ops.convert_to_numpy(part)
        for each in found
        for part in strategy.experimental_local_results(each)
    ]


@pytest.mark.skipif(
    keras.backend.backend() != "torch",
    reason="a program does not know the rows of other workers",
)
def test_run_with_uneven_workers_draws_the_numbers_of_one_device(cluster):
    expected = drawn_in_run(ks.OneDeviceStrategy("cpu:0"), [7])
    for parts in zip(*cluster(drawn_in_run, [5, 2]), expected, strict=True):
        np.testing.assert_array_equal(np.concatenate(parts[:-1]), parts[-1])


def test_uneven_batches_have_the_numbers_of_one_device(cluster):
    expected = fitted(ks.OneDeviceStrategy("cpu:0"))
    for found in cluster(fitted):
        for one, other in zip(expected, found, strict=True):
            np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-5)
