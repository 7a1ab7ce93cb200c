"""Outputs stay on their workers where no code needs all rows of them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
from harness.training import assert_workers, numbers

if keras.backend.backend() == "jax":
    pytest.skip("JAX has no row parts", allow_module_level=True)

import keras_strategies as ks

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
        losses = keras.losses.sparse_categorical_crossentropy(
            y_true, y_pred, from_logits=True
        )
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
    expected, _ = trained(ks.OneDeviceStrategy("cpu:0"), kind)
    every = cluster(trained, kind)
    assert_workers(expected, [found for found, _ in every], 1e-4)
    assert all(is_all == (kind in ("largest", "step")) for _, is_all in every)


CHANNELS = 6


def normalized(strategy: Any) -> Any:
    """Numbers of an epoch with batches of 5, 5 and 4 rows, and what was gathered."""
    x = np.random.default_rng(2).normal(size=(14, CHANNELS)).astype("float32")
    keras.utils.set_random_seed(3)
    with gathered() as found:
        with strategy.scope():
            normalization = keras.layers.BatchNormalization()
            model = keras.Sequential(
                [keras.Input((CHANNELS,)), normalization, keras.layers.Dense(1)]
            )
            model.compile("sgd", "mse")
        model.fit(x, x[:, :1], batch_size=5, shuffle=False, verbose=0)
    return numbers(model), len(found)


def test_batch_normalization_sends_its_statistics_and_no_lengths(cluster: Any) -> None:
    expected, _ = normalized(ks.OneDeviceStrategy("cpu:0"))
    every = cluster(normalized)
    assert_workers(expected, [found for found, _ in every])
    # Once in a step of Torch, in TensorFlow's one program for all of them.
    assert [count for _, count in every] == [3 if TORCH else 1] * 2
