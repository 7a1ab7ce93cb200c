"""Each worker reads its own rows of a `RowDataset`, on every backend."""

from __future__ import annotations

import random
from typing import Any

import keras
import numpy as np
import pytest
from harness.training import assert_same

import keras_strategies as ks

ALL = pytest.mark.parametrize(
    "cluster", ["two", "three", "two_by_two"], indirect=True, scope="session"
)
ROWS, WIDTH, EPOCHS = 23, 3, 2
_random = np.random.default_rng(4)
X = _random.normal(size=(ROWS, WIDTH)).astype("float32")
Y = X.sum(1, keepdims=True)
CLASSES = (X[:, 0] > 0).astype("int32")
WEIGHTS = np.linspace(0.5, 2.0, ROWS).astype("float32")


class Rows(ks.RowDataset):
    """Rows of arrays in an order that changes after each epoch, and counts of reads.

    Args:
        parts: the arrays of `x`, `y` and `sample_weight`.
        batch: int, rows of a batch.
    """

    def __init__(self, parts: Any, batch: int, **arguments: Any):
        super().__init__(**arguments)
        self.parts = parts
        self.batch = batch
        self.order = np.arange(ROWS)
        self.read = 0
        self.begun = self.ended = 0

    def __len__(self) -> int:
        return -(-ROWS // self.batch)

    def on_epoch_begin(self) -> None:
        self.begun += 1

    def on_epoch_end(self) -> None:
        self.ended += 1
        self.order = np.random.default_rng(self.ended).permutation(ROWS)

    def num_rows(self, index: int) -> int:
        return min(self.batch, ROWS - index * self.batch)

    def get_rows(self, index: int, start: int, stop: int) -> Any:
        assert 0 <= start < stop <= self.num_rows(index)
        self.read += stop - start
        first = index * self.batch
        own = self.order[first + start : first + stop]
        return keras.tree.map_structure(lambda part: part[own], self.parts)


def make_model(strategy: Any, by_class: bool, several: int, **arguments: Any) -> Any:
    keras.utils.set_random_seed(5)
    with strategy.scope():
        inputs = {"one": keras.Input((WIDTH,)), "two": keras.Input((WIDTH,))}
        hidden = keras.layers.Concatenate()(list(inputs.values()))
        hidden = keras.layers.BatchNormalization()(hidden)
        outputs = keras.layers.Dense(2 if by_class else 1)(hidden)
        model = keras.Model(inputs, outputs)
        model.compile(
            keras.optimizers.SGD(0.05, momentum=0.9),
            keras.losses.SparseCategoricalCrossentropy(True) if by_class else "mse",
            metrics=["accuracy" if by_class else "mae"],
            weighted_metrics=[],
            steps_per_execution=several,
            **arguments,
        )
    return model


def trained(
    strategy: Any, batch: int, by_class: bool, several: int, workers: int
) -> Any:
    """Numbers of `fit`, `evaluate` and `predict`, and rows that were read in each."""
    model = make_model(strategy, by_class, several)
    random.seed(6)
    x = {"one": X, "two": 2 * X}
    parts = (x, CLASSES) if by_class else (x, Y, WEIGHTS)
    fitted, validated = Rows(parts, batch, workers=workers), Rows(parts, 8)
    weights = {"class_weight": {0: 0.5, 1: 2.0}} if by_class else {}
    history = model.fit(
        fitted, epochs=EPOCHS, validation_data=validated, verbose=0, **weights
    )
    evaluated, predicted = Rows(parts, 7), Rows((x,), 9, workers=workers)
    values = model.evaluate(evaluated, verbose=0)
    outputs = model.predict(predicted, verbose=0)
    numbers = {
        "history": {k: np.asarray(v) for k, v in history.history.items()},
        "weights": {i: np.asarray(w) for i, w in enumerate(model.get_weights())},
        "others": {"evaluate": np.asarray(values), "predict": np.asarray(outputs)},
        "epochs": {
            "begun": np.asarray(fitted.begun),
            "ended": np.asarray(fitted.ended),
        },
    }
    every = [fitted, validated, evaluated, predicted]
    return numbers, [dataset.read for dataset in every]


@ALL
@pytest.mark.parametrize(
    ("batch", "by_class", "several", "workers"),
    [(5, False, 1, 1), (11, True, 2, 2)],
)
def test_rows_of_datasets_are_read_by_their_worker(
    cluster: Any, batch: int, by_class: bool, several: int, workers: int
) -> None:
    arguments = (batch, by_class, several)
    alone, once = trained(ks.OneDeviceStrategy("cpu:0"), *arguments, workers)
    every = cluster(trained, *arguments, workers)
    for index, (found, _) in enumerate(every):
        assert_same(alone, found, 1e-5, f"worker {index}")
    read = np.sum([own for _, own in every], 0)
    # Batches of which a worker has no row, and of those one for each worker.
    few = 0.25 * np.asarray(once)
    assert (read <= once + few).all(), (read, once)
    # On JAX, the last of four devices has none of 5 rows.
    assert max(own[0] for _, own in every) < 0.85 * once[0], (read, once)
