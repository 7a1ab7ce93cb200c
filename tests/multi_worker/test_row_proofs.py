"""Workers split a layer's calls on all of them or on none."""

from __future__ import annotations

import warnings

import keras
import numpy as np
import pytest
from harness.training import assert_workers, numbers
from keras import layers, ops

import keras_strategies as ks

BACKEND = keras.backend.backend()
pytestmark = pytest.mark.skipif(
    BACKEND == "jax", reason="JAX does not split layer calls"
)
X = np.random.default_rng(3).normal(size=(14, 4)).astype("float32")
Y = X.sum(axis=1, keepdims=True)

#: Not empty before the step in which `Standardized` computes something else.
CHANGES: list[int] = []


class Scaled(layers.Layer):
    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones")
        self.average = self.add_weight(shape=(shape[-1],), trainable=False)
        self.built = True

    def call(self, x):
        return self.scale * x


class Standardized(Scaled):
    """Uses statistics of the batch further; once, when told so, it does not."""

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


def fitted(strategy, layer, callbacks, batch_size=5, **options):
    """Numbers after epochs of batches that do not divide."""
    keras.utils.set_random_seed(5)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), layer(), layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1), "mse", **options)
    given = {"batch_size": batch_size, "epochs": 4, "shuffle": False, "verbose": 0}
    model.fit(X, Y, callbacks=callbacks, **given)
    return numbers(model)


@pytest.mark.one_backend("torch", "tensorflow")
@pytest.mark.parametrize("changing", ["no worker", "worker 1"])
def test_sums_that_all_workers_exchange(cluster, changing):
    """A worker that computes other sums in a call does not stop the others."""
    eagerly = changing != "no worker" or BACKEND == "torch"

    def program(strategy):
        changes = strategy.workers and changing == (
            f"worker {strategy.workers.group.index}"
        )

        class Change(keras.callbacks.Callback):
            def on_train_batch_begin(self, batch, logs=None):
                if changes and batch == 1 and self.params["steps"] == 3:
                    CHANGES.append(batch)

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = fitted(strategy, Standardized, [Change()], run_eagerly=eagerly)
        said = [str(w.message) for w in caught if "split by rows" in str(w.message)]
        if not strategy.workers:
            return found
        proofs = strategy.drivers.fit._call._row_proofs._layers.values()
        events = [each.events for layer in proofs for each in layer.found.values()]
        assert any(events) and not said
        return found

    assert_workers(program(ks.OneDeviceStrategy("cpu:0")), cluster(program))


def test_settings_that_one_worker_changes_in_each_step(cluster):
    def program(strategy):
        class Noting(keras.callbacks.Callback):
            def on_train_batch_begin(self, batch, logs=None):
                if strategy.workers and strategy.workers.group.index == 1:
                    layer = self.model.layers[0]
                    layer.steps = getattr(layer, "steps", 0) + 1

        return fitted(strategy, Scaled, [Noting()], batch_size=2)

    assert_workers(program(ks.OneDeviceStrategy("cpu:0")), cluster(program))
