"""Workers split a layer's calls on all of them or on none."""

from __future__ import annotations

import warnings

import keras
import numpy as np
import pytest
from keras import layers, ops

import keras_strategies as ks

pytestmark = pytest.mark.skipif(
    keras.backend.backend() == "jax", reason="JAX does not split layer calls"
)
X = np.random.default_rng(3).normal(size=(14, 4)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


#: Not empty before the step in which `Standardized` computes something else.
CHANGES: list[int] = []


class Scaled(layers.Layer):
    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones")
        self.built = True

    def call(self, x):
        return self.scale * x


class Centered(Scaled):
    """Subtracts the largest of the batch, which no slice of it has."""

    def call(self, x):
        return self.scale * (x - ops.max(x, axis=0))


class Standardized(Scaled):
    """Uses statistics of the batch further; once, when told so, it does not."""

    def build(self, shape):
        super().build(shape)
        self.average = self.add_weight(shape=(shape[-1],), trainable=False)

    def call(self, x):
        if CHANGES:
            CHANGES.clear()
            return self.scale * x
        h = self.scale * x
        kept = ops.cast(x[:, 0] > 0, "float32")
        total = ops.sum(kept * h[:, 1])
        self.add_loss(0.1 * ops.square(total / ops.maximum(ops.sum(kept), 1)))
        h = h - ops.mean(h, axis=0)
        variance = ops.mean(ops.square(h), axis=0)
        self.average.assign(0.9 * self.average + 0.1 * ops.sqrt(variance + 0.1))
        return h / ops.sqrt(variance + 0.1)


def fitted(strategy, mixes_rows: bool):
    """Weights after a batch of 8 rows and one of 6."""
    keras.utils.set_random_seed(5)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,))])
        model.add(Centered() if mixes_rows else Scaled())
        model.add(layers.Dense(1))
        model.compile(keras.optimizers.SGD(0.1), "mse")
    model.fit(X, Y, batch_size=8, shuffle=False, verbose=0)
    return [ops.convert_to_numpy(variable) for variable in model.trainable_variables]


@pytest.mark.one_backend("torch", "tensorflow")
@pytest.mark.parametrize("who", ["all", "worker 1"])
def test_a_problem_that_one_worker_finds_counts_on_all(cluster, who):
    def program(strategy):
        from keras_strategies.rows import row_proofs

        proved = row_proofs.RowProofs._proved
        if who == "worker 1" and strategy.workers.group.index == 1:
            # As if this worker's script had set another attribute of a layer.
            row_proofs.RowProofs._proved = lambda *_: row_proofs.RowProof(
                problem="operation 'x' has no rule"
            )
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                weights = fitted(strategy, mixes_rows=who == "all")
        finally:
            row_proofs.RowProofs._proved = proved
        said = [w for w in caught if "split by rows" in str(w.message)]
        return weights, len(said)

    expected = fitted(ks.OneDeviceStrategy("cpu:0"), mixes_rows=who == "all")
    for weights, warned in cluster(program):
        assert warned == 1
        for one, other in zip(weights, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def standardized(strategy, eagerly, changing=False):
    """Weights after two epochs of three batches: 5, 5 and 4 rows."""
    keras.utils.set_random_seed(5)

    class Change(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if changing and batch == 1 and self.params["steps"] == 3:
                CHANGES.append(batch)

    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), Standardized(), layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=eagerly)
    model.fit(
        X, Y, batch_size=5, epochs=2, shuffle=False, verbose=0, callbacks=[Change()]
    )
    return [ops.convert_to_numpy(variable) for variable in model.variables]


@pytest.mark.one_backend("torch", "tensorflow")
@pytest.mark.parametrize("changing", ["no worker", "worker 1"])
def test_sums_that_all_workers_exchange(cluster, changing):
    """A worker that computes other sums in a call does not stop the others."""
    eagerly = changing != "no worker" or keras.backend.backend() == "torch"

    def program(strategy):
        changes = changing == f"worker {strategy.workers.group.index}"
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            weights = standardized(strategy, eagerly, changes)
        said = [str(w.message) for w in caught if "split by rows" in str(w.message)]
        proofs = strategy.drivers.fit._call._row_proofs._layers.values()
        found = [each for layer in proofs for each in layer.found.values()]
        return weights, said, any(each.events for each in found)

    expected = standardized(ks.OneDeviceStrategy("cpu:0"), eagerly)
    for weights, said, is_exchanged in cluster(program):
        assert is_exchanged and not said
        for one, other in zip(weights, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_settings_that_one_worker_changes_in_each_step(cluster):
    def program(strategy):
        with strategy.scope():
            keras.utils.set_random_seed(5)
            layer = Scaled()
            model = keras.Sequential([keras.Input((4,)), layer, layers.Dense(1)])
            model.compile(keras.optimizers.SGD(0.1), "mse")

        class Noting(keras.callbacks.Callback):
            def on_train_batch_begin(self, batch, logs=None):
                if strategy.workers.group.index == 1:
                    layer.steps = getattr(layer, "steps", 0) + 1

        model.fit(
            X,
            Y,
            batch_size=7,
            epochs=10,
            shuffle=False,
            verbose=0,
            callbacks=[Noting()],
        )
        return [ops.convert_to_numpy(v) for v in model.trainable_variables]

    first, second = cluster(program)
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one, other)


class Flagged(layers.Layer):
    """Mixes rows if a setting of Keras says so."""

    def call(self, x):
        is_on = keras.config.epsilon() > 1e-6
        return x - ops.mean(x, axis=0) if is_on else x * 0.5


@pytest.mark.nightly
def test_flag_that_all_workers_change(cluster):
    """What replicas call differs from the proof on all workers."""

    def program(strategy):
        with strategy.scope():
            keras.utils.set_random_seed(5)
            model = keras.Sequential([keras.Input((4,)), layers.Dense(4), Flagged()])
            model.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=True)
        losses = []
        try:
            for epsilon in (1e-7, 1e-5, 1e-7):
                keras.config.set_epsilon(epsilon)
                losses.append(float(model.train_on_batch(X, Y)))
        finally:
            keras.config.set_epsilon(1e-7)
        return losses

    expected = program(ks.OneDeviceStrategy("cpu:0"))
    for losses in cluster(program):
        np.testing.assert_allclose(losses, expected, rtol=1e-5)
