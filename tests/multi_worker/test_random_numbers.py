"""Random numbers of several workers' rows are those of one device."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras import layers, ops

import keras_strategies as ks

X = np.random.default_rng(3).normal(size=(20, 4)).astype("float32")
Y = X.sum(axis=1, keepdims=True)
#: There a `run` is compiled in any case.
NOT_ON_JAX = [pytest.mark.nightly] if keras.backend.backend() == "jax" else []


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


def drawn_in_run(strategy, sizes, compiled):
    """What the replicas of this worker draw.

    Args:
        sizes: for each run, the rows of each replica.
        compiled: bool, whether each run is in a `ks.function`.
    """
    with strategy.scope():
        layer, seed = layers.Dropout(0.5), keras.random.SeedGenerator(3)

    def fn(x):
        noise = keras.random.uniform((2 * ops.shape(x)[0], 3), seed=seed)
        noise = ops.sum(ops.reshape(noise, (-1, 2, 3)), 1)
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


@pytest.mark.parametrize(
    ("cluster", "compiled"),
    # On JAX an array of one replica is the same on all workers in a `ks.function`.
    [("two", False), pytest.param("two_by_two", True, marks=NOT_ON_JAX)]
    + [("two", True)] * (keras.backend.backend() != "jax"),
    indirect=["cluster"],
    scope="session",
)
def test_run_with_uneven_workers_draws_the_numbers_of_one_device(cluster, compiled):
    sizes = [[5, 2], [5, 2], [4, 3], [5, 0]]
    if cluster.replicas == 4:
        sizes = [[3, 2, 2, 4], [3, 3, 0, 2], [5, 2, 3, 4]]
    totals = [[sum(counts)] for counts in sizes]
    one_device = ks.OneDeviceStrategy("cpu:0")
    expected = drawn_in_run(one_device, totals, compiled)
    workers = cluster(drawn_in_run, sizes, compiled)
    for one, *parts in zip(expected, *workers, strict=True):
        np.testing.assert_allclose(np.concatenate(parts), one, rtol=1e-6, atol=1e-6)


def test_uneven_batches_have_the_numbers_of_one_device(cluster):
    expected = fitted(ks.OneDeviceStrategy("cpu:0"))
    for found in cluster(fitted):
        for one, other in zip(expected, found, strict=True):
            np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-5)


def drawn_with_fixed_lengths(strategy, runs, lengths, compiled):
    """What the replicas of this worker draw, or the text of the error.

    Args:
        runs: for each run, the rows of each replica.
        lengths: ints, of the draws besides that of rows.
        compiled: bool, whether each run is in a `ks.function`.
    """
    with strategy.scope():
        seed = keras.random.SeedGenerator(3)

    def fn(x):
        found = x + keras.random.uniform(ops.shape(x), seed=seed)
        for length in lengths:
            noise = keras.random.normal((length, 3), seed=seed)
            found = found + ops.mean(noise, axis=0)
        return found

    def step(rows):
        return strategy.run(fn, args=(rows,))

    step = ks.function(step) if compiled else step
    found = []
    for counts in runs:
        rows = strategy.experimental_distribute_values_from_function(
            lambda replica, counts=counts: ops.ones(
                (counts[replica.replica_id_in_sync_group], 3)
            )
        )
        try:
            results = strategy.experimental_local_results(step(rows))
        except Exception as error:
            if "does not follow from the lengths" not in str(error):
                raise
            return [*found, str(error)]
        found.append(np.concatenate([ops.convert_to_numpy(each) for each in results]))
    return found


def assert_fixed_lengths_are_shared(cluster, runs, lengths, compiled, is_error=None):
    """Fails if a draw differs from that of one device.

    Args:
        is_error: int, the run in which errors are expected; None for no error.
    """
    totals = [[sum(counts)] for counts in runs]
    one_device = ks.OneDeviceStrategy("cpu:0")
    expected = drawn_with_fixed_lengths(one_device, totals, lengths, compiled)
    workers = cluster(drawn_with_fixed_lengths, runs, lengths, compiled)
    if is_error is not None:
        for found in workers:
            assert len(found) == is_error + 1
            assert isinstance(found.pop(), str)
        del expected[is_error:]
    for one, *parts in zip(expected, *workers, strict=True):
        np.testing.assert_allclose(np.concatenate(parts), one, rtol=1e-6, atol=1e-6)


BACKEND = keras.backend.backend()


@pytest.mark.parametrize("lengths", [[3], [7, 5]])
def test_fixed_lengths_are_not_the_rows_of_one_worker(cluster, lengths):
    """Of workers with one replica, whose draws are compared at the end of a run."""
    if BACKEND == "jax" and lengths == [3]:
        # There, one process traces all replicas, in their order.
        return assert_fixed_lengths_are_shared(cluster, [[5, 3]], lengths, False)
    assert_fixed_lengths_are_shared(cluster, [[5, 3]], lengths, False, is_error=0)


@pytest.mark.skipif(BACKEND != "tensorflow", reason="lengths are values of a program")
@pytest.mark.parametrize("lengths", [[3], [7, 5]])
def test_programs_exchange_fixed_lengths(cluster, lengths):
    runs = [[5, 3], [3, 5], [4, 5], [5, 5], [3, 3], [1, 3]]
    assert_fixed_lengths_are_shared(cluster, runs, lengths, True)


@pytest.mark.parametrize("compiled", [False, *[True] * (BACKEND == "tensorflow")])
def test_earlier_runs_of_workers_show_which_lengths_are_fixed(cluster, compiled):
    runs = [[6, 5], [4, 4], [3, 4], [4, 4]]
    assert_fixed_lengths_are_shared(cluster, runs, [4], compiled)


@pytest.mark.parametrize("compiled", [False, *[True] * (BACKEND == "tensorflow")])
def test_later_runs_of_workers_do_not_change_which_lengths_are_fixed(cluster, compiled):
    runs = [[4, 4], [6, 5]]
    with pytest.raises(AssertionError, match="Not equal"):
        # All workers have as many rows, as many as the length.
        assert_fixed_lengths_are_shared(cluster, runs[:1], [4], compiled)
    found = cluster(drawn_with_fixed_lengths, runs, [4], compiled)
    for each in found:
        assert "earlier" in each[1]
