"""Workers split a call on all of them or on none, and keep their rows of outputs."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
from harness.training import assert_workers, numbers
from keras import layers, ops
from multi_worker.clusters import assert_as_one_device, dense, one_device

if keras.backend.backend() == "jax":
    pytest.skip("JAX has no row parts", allow_module_level=True)


TORCH = keras.backend.backend() == "torch"
WORDS, STEPS, WIDTH = 500, 12, 4
X = np.random.default_rng(1).integers(1, WORDS, (14, STEPS)).astype("int32")
X[:5, 7:] = 0


class Custom(keras.Model):
    """A step that looks at all outputs."""

    def train_step(self, data: Any) -> Any:
        found = super().train_step(data)
        return {**found, "largest": keras.ops.max(self(data[0], training=False))}


class Words(keras.metrics.Metric):
    """A metric with an update of its own, as the perplexity of keras-hub."""

    def __init__(self, name: str = "words") -> None:
        super().__init__(name=name)
        self.total = self.add_weight(initializer="zeros", name="total")
        self.count = self.add_weight(initializer="zeros", name="count")
        self.batches = self.add_weight(initializer="zeros", name="batches")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        crossentropy = keras.losses.sparse_categorical_crossentropy
        losses = crossentropy(y_true, y_pred, from_logits=True)
        seen = keras.ops.cast(y_true > 0, losses.dtype)
        self.total.assign_add(keras.ops.sum(losses * seen))
        self.count.assign_add(keras.ops.sum(seen))
        self.batches.assign_add(1)

    def result(self) -> Any:
        return keras.ops.exp(self.total / self.count) + self.batches


class Largest(keras.metrics.Metric):
    """A metric that is not a sum over rows."""

    def __init__(self) -> None:
        super().__init__(name="largest")
        self.value = self.add_weight(initializer="zeros", name="value")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.value.assign(keras.ops.maximum(self.value, keras.ops.max(y_pred)))

    def result(self) -> Any:
        return self.value


@contextlib.contextmanager
def gathered() -> Iterator[list[int]]:
    """The rows that are gathered, without those of gradients of tables."""
    if TORCH:
        from keras_strategies.engines.torch.worker_collectives import (
            TorchCommunicator as Workers,
        )
    else:
        from keras_strategies.engines.tensorflow.workers.worker_collectives import (
            TensorFlowCommunicator as Workers,
        )
    kind: Any = Workers
    found, gather = [], kind.gather_rows

    def gather_rows(self: Any, tensor: Any, rows: Any) -> Any:
        if sys._getframe(1).f_code.co_qualname != "RowsOfTables.gather":
            found.append(tuple(tensor.shape))
        return gather(self, tensor, rows)

    kind.gather_rows = gather_rows
    try:
        yield found
    finally:
        kind.gather_rows = gather


def trained(strategy: Any, kind: str) -> Any:
    """Numbers of an epoch with batches of 5, 5 and 4 rows, and what was gathered."""
    others = [Largest()] if kind == "largest" else []
    keras.utils.set_random_seed(3)
    with gathered() as found:
        with strategy.scope():
            inputs = keras.Input((STEPS,), dtype="int32")
            table = keras.layers.Embedding(WORDS, WIDTH, mask_zero=kind == "masked")
            outputs = keras.layers.Dense(WORDS)(table(inputs))
            model = (Custom if kind == "step" else keras.Model)(inputs, outputs)
            model.compile(
                keras.optimizers.SGD(0.1, momentum=0.9),
                keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                metrics=["sparse_categorical_accuracy", Words(), *others],
            )
        history = model.fit(X, X, batch_size=5, shuffle=False, verbose=0)
        evaluated = model.evaluate(X, X, batch_size=5, verbose=0)
        is_gathered = any(shape[-1] == WORDS for shape in found)
        predicted = model.predict(X, batch_size=5, verbose=0)
    return numbers(model, history, evaluated, predicted), is_gathered


@pytest.mark.one_backend("torch", "tensorflow")
@pytest.mark.nightly(unless=["two-", "two-largest", "two-step"])
@pytest.mark.parametrize("kind", ["", "masked", "largest", "step"])
def test_outputs_stay_on_their_workers(cluster: Any, kind: str) -> None:
    """Except for a metric that is no sum, and a step that reads them."""
    expected, _ = trained(one_device(), kind)
    every = cluster(trained, kind)
    assert_workers(expected, [found for found, _ in every], 1e-4)
    assert all(is_all == (kind in ("largest", "step")) for _, is_all in every)


CHANNELS = 6


def normalized(strategy: Any) -> Any:
    """Numbers of an epoch with batches of 5, 5 and 4 rows, and what was gathered."""
    x = np.random.default_rng(2).normal(size=(14, CHANNELS)).astype("float32")
    with gathered() as found:
        model = dense(
            *(strategy, CHANNELS),
            lambda: [layers.BatchNormalization(), layers.Dense(1)],
            seed=3,
        )
        model.fit(x, x[:, :1], batch_size=5, shuffle=False, verbose=0)
    return numbers(model), len(found)


def test_batch_normalization_sends_its_statistics_and_no_lengths(cluster: Any) -> None:
    expected, _ = normalized(one_device())
    every = cluster(normalized)
    assert_workers(expected, [found for found, _ in every])
    # Once in a step of Torch, in TensorFlow's one program for all of them.
    assert [count for _, count in every] == [3 if TORCH else 1] * 2


# Calls that not all workers prove alike.

ROWS = np.random.default_rng(3).normal(size=(14, 4)).astype("float32")

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
    model = dense(
        *(strategy, 4, lambda: [layer(), layers.Dense(1)]),
        lambda: keras.optimizers.SGD(0.1),
        **options,
    )
    given = {"batch_size": batch_size, "epochs": 4, "shuffle": False, "verbose": 0}
    model.fit(ROWS, ROWS.sum(1), callbacks=callbacks, **given)
    return numbers(model)


@pytest.mark.one_backend("torch", "tensorflow")
@pytest.mark.parametrize("changing", ["no worker", "worker 1"])
def test_sums_that_all_workers_exchange(cluster, changing):
    """A worker that computes other sums in a call does not stop the others."""
    eagerly = changing != "no worker" or TORCH

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

    assert_as_one_device(cluster, program)


def test_settings_that_one_worker_changes_in_each_step(cluster):
    def program(strategy):
        class Noting(keras.callbacks.Callback):
            def on_train_batch_begin(self, batch, logs=None):
                if strategy.workers and strategy.workers.group.index == 1:
                    layer = self.model.layers[0]
                    layer.steps = getattr(layer, "steps", 0) + 1

        return fitted(strategy, Scaled, [Noting()], batch_size=2)

    assert_as_one_device(cluster, program)
