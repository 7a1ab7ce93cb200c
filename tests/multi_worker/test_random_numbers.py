"""Random numbers of several workers' rows are those of one device."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from harness.training import numbers
from keras import layers, ops
from multi_worker.clusters import assert_as_one_device, dense, on_clusters, one_device

import keras_strategies as ks

pytestmark = pytest.mark.one_backend

BACKEND = keras.backend.backend()
X = np.random.default_rng(3).normal(size=(20, 4)).astype("float32")
Y = X.sum(axis=1, keepdims=True)
#: The rows of each replica in each run.
SIZES = {
    2: [[5, 2], [5, 2], [4, 3], [5, 0]],
    4: [[3, 2, 2, 4], [3, 3, 0, 2], [5, 2, 3, 4]],
}


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
    """Numbers of two epochs with batches of 7, 7 and 6 rows."""

    def stack():
        first = [layers.Dense(6, "tanh"), layers.Dropout(0.4)]
        first += [layers.GaussianNoise(0.3, seed=2), layers.Dense(4)]
        return [*first, Noisy(), layers.Dense(1)]

    model = dense(strategy, 4, stack, lambda: keras.optimizers.SGD(0.05))
    history = model.fit(X, Y, batch_size=7, epochs=2, shuffle=False, verbose=0)
    return numbers(model, history)


@pytest.mark.one_backend("jax")
def test_uneven_batches_have_the_numbers_of_one_device(cluster):
    assert_as_one_device(cluster, fitted, tolerance=1e-4)


def drawn_in_run(strategy, sizes, compiled):
    """What the replicas of this worker draw in each run."""
    with strategy.scope():
        layer, seed = layers.Dropout(0.5), keras.random.SeedGenerator(3)

    def fn(x):
        noise = keras.random.uniform((ops.shape(x)[0], 2, 3), seed=seed)
        noise = ops.sum(noise, 1)
        shared = ops.mean(keras.random.normal((11, 3), seed=seed), 0)
        return layer(x, training=True) + noise + shared

    def step(rows):
        return strategy.run(fn, args=(rows,))

    keras.utils.set_random_seed(7)
    step = ks.function(step) if compiled else step
    found = []
    for counts in sizes:
        rows = strategy.experimental_distribute_values_from_function(
            lambda replica, counts=counts: ops.ones(
                (counts[replica.replica_id_in_sync_group], 3)
            )
        )
        results = strategy.experimental_local_results(step(rows))
        found.append(np.concatenate([ops.convert_to_numpy(each) for each in results]))
    return found


# On JAX an array of one replica is the same on all workers in a `ks.function`.
@pytest.mark.nightly(unless=["two-False"])
@pytest.mark.parametrize("compiled", [False] if BACKEND == "jax" else [False, True])
@on_clusters("two", "two_by_two")
def test_run_with_uneven_workers_draws_the_numbers_of_one_device(cluster, compiled):
    sizes = SIZES[cluster.replicas]
    totals = [[sum(counts)] for counts in sizes]
    expected = drawn_in_run(one_device(), totals, compiled)
    workers = cluster(drawn_in_run, sizes, compiled)
    for one, *parts in zip(expected, *workers, strict=True):
        np.testing.assert_allclose(np.concatenate(parts), one, rtol=1e-6, atol=1e-6)
