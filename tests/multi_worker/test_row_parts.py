"""What workers send in a step does not depend on the outputs of the model."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

if keras.backend.backend() != "torch":
    pytest.skip("JAX and TensorFlow have no row parts", allow_module_level=True)

import keras_strategies as ks

WORDS, STEPS, WIDTH = 500, 12, 4
X = np.random.default_rng(1).integers(1, WORDS, (14, STEPS)).astype("int32")
X[:5, 7:] = 0
#: What is sent besides gradients: shares of losses, metrics and flags.
MOST_BYTES = 4096


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


def trained(
    strategy: Any, is_custom: bool, is_masked: bool, with_largest: bool = False
) -> dict[str, Any]:
    """Results of two epochs with batches of 5, 5 and 4 rows, and the bytes sent."""
    from keras_strategies.engines.torch.worker_collectives import TorchWorkers

    others = [Largest()] if with_largest else []
    sent = {"gathered": 0, "reduced": 0}
    gather, reduce = TorchWorkers.gather_rows, TorchWorkers.start_all_reduce

    def gather_rows(self: Any, tensor: Any, rows: Any) -> Any:
        found = gather(self, tensor, rows)
        sent["gathered"] += found.nbytes
        return found

    def start_all_reduce(self: Any, op: Any, flat: Any) -> Any:
        sent["reduced"] += flat.nbytes
        return reduce(self, op, flat)

    TorchWorkers.gather_rows, TorchWorkers.start_all_reduce = (
        gather_rows,
        start_all_reduce,
    )
    try:
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
        model.fit(X, X, batch_size=5, epochs=1, shuffle=False, verbose=0)
        sent.update(gathered=0, reduced=0)
        history = model.fit(X, X, batch_size=5, epochs=1, shuffle=False, verbose=0)
        fitted = dict(sent)
        evaluated = model.evaluate(X, X, batch_size=5, verbose=0)
        sent_in_evaluate = {k: sent[k] - fitted[k] for k in sent}
        predicted = model.predict(X, batch_size=5, verbose=0)
    finally:
        TorchWorkers.gather_rows, TorchWorkers.start_all_reduce = gather, reduce
    trained_bytes = sum(4 * np.prod(v.shape) for v in model.trainable_variables)
    return {
        "numbers": [
            *map(np.asarray, history.history.values()),
            np.asarray(evaluated),
            np.asarray(predicted),
            *model.get_weights(),
        ],
        "fit": fitted,
        "evaluate": sent_in_evaluate,
        "gradients": 3 * int(trained_bytes),
    }


def check_numbers(expected: Any, found: Any) -> None:
    for one, other in zip(expected["numbers"], found["numbers"], strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("is_masked", [False, True])
def test_outputs_stay_on_their_workers(cluster: Any, is_masked: bool) -> None:
    expected = trained(ks.OneDeviceStrategy("cpu:0"), False, is_masked)
    for found in cluster(trained, False, is_masked):
        check_numbers(expected, found)
        assert found["fit"]["gathered"] == 0
        assert found["evaluate"]["gathered"] == 0
        others = found["fit"]["reduced"] - found["gradients"]
        assert 0 <= others < MOST_BYTES
        assert found["evaluate"]["reduced"] < MOST_BYTES


def test_a_metric_that_is_no_sum_has_all_rows(cluster: Any) -> None:
    expected = trained(ks.OneDeviceStrategy("cpu:0"), False, False, True)
    for found in cluster(trained, False, False, True):
        check_numbers(expected, found)
        assert found["fit"]["gathered"] == len(X) * STEPS * WORDS * 4


def test_a_step_that_reads_outputs_has_all_of_them(cluster: Any) -> None:
    expected = trained(ks.OneDeviceStrategy("cpu:0"), True, False)
    for found in cluster(trained, True, False):
        check_numbers(expected, found)
        # Once in each step.
        assert found["fit"]["gathered"] == len(X) * STEPS * WORDS * 4
