"""What workers send in a step does not depend on the outputs of the model."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest

if keras.backend.backend() == "jax":
    pytest.skip("JAX has no row parts", allow_module_level=True)

import keras_strategies as ks

WORDS, STEPS, WIDTH = 500, 12, 4
X = np.random.default_rng(1).integers(1, WORDS, (14, STEPS)).astype("int32")
X[:5, 7:] = 0
#: What is sent besides gradients: shares of losses, metrics and flags.
MOST_BYTES = 4096
#: Torch counts steps, of 5, 5 and 4 rows, and TensorFlow one program for all of them.
STEPS_OR_PROGRAMS = 3 if keras.backend.backend() == "torch" else 1
#: Bytes of all outputs, in these steps or programs.
OUTPUTS = (len(X) if keras.backend.backend() == "torch" else 1) * STEPS * WORDS * 4


class Custom(keras.Model):
    """A step that looks at all outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.table = keras.layers.Embedding(WORDS, WIDTH)
        self.words = keras.layers.Dense(WORDS)

    def call(self, x: Any) -> Any:
        return self.words(self.table(x))

    def train_step(self, data: Any) -> Any:
        found = super().train_step(data)
        x, _ = data
        return {**found, "largest": keras.ops.max(self(x, training=False))}


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
def counted() -> Iterator[dict[str, int]]:
    """Counts the bytes that are gathered and reduced.

    On TensorFlow those of each program: its rows are unknown, and count as one.
    Gradients of tables, which are gathered there, are not counted.
    """
    sent = {"gathered": 0, "reduced": 0, "reductions": 0}
    if keras.backend.backend() == "torch":
        from keras_strategies.engines.torch.worker_collectives import TorchCommunicator

        kind, reducing = TorchCommunicator, "start_all_reduce"
    else:
        from keras_strategies.engines.tensorflow.workers.worker_collectives import (
            TensorFlowCommunicator,
        )

        kind, reducing = TensorFlowCommunicator, "_reduce"
    gather, reduce = kind.gather_rows, getattr(kind, reducing)

    def gather_rows(self: Any, tensor: Any, rows: Any) -> Any:
        found = gather(self, tensor, rows)
        if sys._getframe(1).f_code.co_qualname != "RowsOfTables.gather":
            sent["gathered"] += size(found)
        return found

    def reduced(self: Any, op: Any, flat: Any) -> Any:
        sent["reduced"] += size(flat)
        sent["reductions"] += 1
        return reduce(self, op, flat)

    kind.gather_rows = gather_rows
    setattr(kind, reducing, reduced)
    try:
        yield sent
    finally:
        kind.gather_rows = gather
        setattr(kind, reducing, reduce)


def size(tensor: Any) -> int:
    if keras.backend.backend() == "torch":
        return int(tensor.nbytes)
    return math.prod(n or 1 for n in tensor.shape) * int(tensor.dtype.size)


def trained(
    strategy: Any, is_custom: bool, is_masked: bool, with_largest: bool = False
) -> dict[str, Any]:
    """Results of two epochs with batches of 5, 5 and 4 rows, and the bytes sent."""
    others = [Largest()] if with_largest else []
    with counted() as sent:
        keras.utils.set_random_seed(3)
        with strategy.scope():
            if is_custom:
                model: Any = Custom()
                model.build((None, STEPS))
            else:
                inputs = keras.Input((STEPS,), dtype="int32")
                table = keras.layers.Embedding(WORDS, WIDTH, mask_zero=is_masked)
                outputs = keras.layers.Dense(WORDS)(table(inputs))
                model = keras.Model(inputs, outputs)
            model.compile(
                keras.optimizers.SGD(0.1, momentum=0.9),
                keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                metrics=["sparse_categorical_accuracy", Words(), *others],
            )
        if keras.backend.backend() == "torch":
            model.fit(X, X, batch_size=5, epochs=1, shuffle=False, verbose=0)
            sent.update(dict.fromkeys(sent, 0))
        history = model.fit(X, X, batch_size=5, epochs=1, shuffle=False, verbose=0)
        fitted = dict(sent)
        evaluated = model.evaluate(X, X, batch_size=5, verbose=0)
        sent_in_evaluate = {k: sent[k] - fitted[k] for k in sent}
        predicted = model.predict(X, batch_size=5, verbose=0)
    dense = [
        v
        for v in model.trainable_variables
        if keras.backend.backend() == "torch" or "embedding" not in v.path
    ]
    trained_bytes = sum(4 * np.prod(v.shape) for v in dense)
    return {
        "numbers": [
            *map(np.asarray, history.history.values()),
            np.asarray(evaluated),
            np.asarray(predicted),
            *model.get_weights(),
        ],
        "fit": fitted,
        "evaluate": sent_in_evaluate,
        "gradients": STEPS_OR_PROGRAMS * int(trained_bytes),
    }


def check_numbers(expected: Any, found: Any) -> None:
    for one, other in zip(expected["numbers"], found["numbers"], strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-5)


@pytest.mark.nightly
@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.parametrize(
    "cluster",
    ["two", pytest.param("four", marks=pytest.mark.nightly)],
    indirect=True,
    scope="session",
)
def test_outputs_stay_on_their_workers(cluster: Any, is_masked: bool) -> None:
    expected = trained(ks.OneDeviceStrategy("cpu:0"), False, is_masked)
    for found in cluster(trained, False, is_masked):
        check_numbers(expected, found)
        assert found["fit"]["gathered"] == 0
        assert found["evaluate"]["gathered"] == 0
        others = found["fit"]["reduced"] - found["gradients"]
        assert 0 <= others < MOST_BYTES
        assert found["evaluate"]["reduced"] < MOST_BYTES
        # Of the loss and its mask, of all metrics, and of all gradients.
        reductions = found["evaluate"]["reductions"], found["fit"]["reductions"]
        assert reductions == (
            (2 + is_masked) * STEPS_OR_PROGRAMS,
            (3 + is_masked) * STEPS_OR_PROGRAMS,
        )


def test_a_metric_that_is_no_sum_has_all_rows(cluster: Any) -> None:
    expected = trained(ks.OneDeviceStrategy("cpu:0"), False, False, True)
    for found in cluster(trained, False, False, True):
        check_numbers(expected, found)
        assert found["fit"]["gathered"] == OUTPUTS


@pytest.mark.one_backend("torch")
def test_a_step_that_reads_outputs_has_all_of_them(cluster: Any) -> None:
    expected = trained(ks.OneDeviceStrategy("cpu:0"), True, False)
    for found in cluster(trained, True, False):
        check_numbers(expected, found)
        # Once in each step.
        assert found["fit"]["gathered"] == OUTPUTS


CHANNELS = 6


def normalized(strategy: Any) -> dict[str, Any]:
    """An epoch with batches of 5, 5 and 4 rows, and the bytes sent."""
    x = np.random.default_rng(2).normal(size=(14, CHANNELS)).astype("float32")
    keras.utils.set_random_seed(3)
    with counted() as sent:
        with strategy.scope():
            model = keras.Sequential(
                [
                    keras.Input((CHANNELS,)),
                    keras.layers.BatchNormalization(),
                    keras.layers.Dense(1),
                ]
            )
            model.compile("sgd", "mse")
        model.fit(x, x[:, :1], batch_size=5, shuffle=False, verbose=0)
    return {"numbers": model.get_weights(), "sent": dict(sent)}


def test_batch_normalization_sends_its_statistics_and_no_lengths(cluster: Any) -> None:
    expected = normalized(ks.OneDeviceStrategy("cpu:0"))
    every = cluster(normalized)
    for found in every:
        check_numbers(expected, found)
        # Count, mean and squared deviations of each worker.
        statistics = STEPS_OR_PROGRAMS * len(every) * 3 * CHANNELS * 4
        assert found["sent"]["gathered"] == statistics
