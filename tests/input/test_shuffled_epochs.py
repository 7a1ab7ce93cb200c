"""The rows that each epoch reads, in the order that Keras has without a strategy."""

from __future__ import annotations

import contextlib
from typing import Any

import keras
import numpy as np
import pytest
from harness.batches_ahead import prepare_ahead
from harness.strategies import STRATEGIES

import keras_strategies as ks

pytestmark = pytest.mark.one_backend

tf = pytest.importorskip("tensorflow")

BACKEND = keras.backend.backend()
X = np.arange(40, dtype="float32")[:, None]
Y = np.cos(X)
EPOCHS = 3


class Recorded(keras.Sequential):
    """A model that records the rows of each step."""

    def __init__(self) -> None:
        super().__init__([keras.Input((1,)), keras.layers.Dense(1)])
        self.steps: list[tuple[str, list[int]]] = []

    def _record(self, kind: str, arguments: Any) -> None:
        x, _, _ = keras.utils.unpack_x_y_sample_weight(arguments[-1])
        rows = np.asarray(keras.ops.convert_to_numpy(x)).ravel().round().astype(int)
        self.steps.append((kind, rows.tolist()))

    def train_step(self, *arguments: Any) -> Any:
        self._record("fit", arguments)
        return super().train_step(*arguments)

    def test_step(self, *arguments: Any) -> Any:
        self._record("evaluate", arguments)
        return super().test_step(*arguments)


def slices() -> Any:
    return tf.data.Dataset.from_tensor_slices((X, Y))


def noisy(x: Any, y: Any) -> Any:
    return x + tf.random.uniform((), 0, 60, seed=3), y


def shuffled(**options: Any) -> Any:
    return slices().shuffle(40, **options).batch(8)


def endless() -> Any:
    """Passes without end, read only as far as `next` is called."""
    options = tf.data.Options()
    options.experimental_optimization.inject_prefetch = False
    return shuffled(seed=5).repeat().with_options(options)


class ShuffledRows(keras.utils.PyDataset):
    """Rows in an order that changes from epoch to epoch, as in Keras's guides."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.order = np.arange(40)

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        rows = self.order[index * 8 : index * 8 + 8]
        return X[rows], Y[rows]

    def on_epoch_end(self) -> None:
        np.random.shuffle(self.order)


#: Arguments of `fit`, by name.
INPUT: dict[str, Any] = {
    "seed": lambda: {"x": shuffled(seed=5)},
    "global seed": lambda: {"x": shuffled()},
    "one order": lambda: {"x": shuffled(seed=5, reshuffle_each_iteration=False)},
    "unknown length": lambda: {
        "x": slices().filter(lambda x, y: x[0] % 2 == 1).shuffle(40, 5).batch(8)
    },
    "endless": lambda: {"x": endless(), "steps_per_epoch": 3},
    "short epochs": lambda: {"x": shuffled(seed=5).repeat(2), "steps_per_epoch": 5},
    "random map": lambda: {"x": slices().map(noisy).batch(8)},
    "class weights": lambda: {
        "x": shuffled(seed=5).map(lambda x, y: (x, tf.cast(y > 0, "int32"))),
        "class_weight": {0: 1.0, 1: 2.0},
    },
    "validation": lambda: {
        "x": slices().batch(8),
        "validation_data": shuffled(seed=5),
        "validation_freq": 2,
    },
    "validation on the same": lambda: dict.fromkeys(
        ["x", "validation_data"], shuffled(seed=5)
    ),
    "arrays": lambda: {"x": X, "y": Y, "batch_size": 8},
    "arrays in batches": lambda: {"x": X, "y": Y, "batch_size": 8, "shuffle": "batch"},
    "PyDataset": lambda: {"x": ShuffledRows(workers=1), "shuffle": True},
}


def steps(strategy: Any, name: str) -> list[Any]:
    keras.utils.set_random_seed(11)
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        model = Recorded()
        model.compile("sgd", "mse", run_eagerly=True)
    arguments = INPUT[name]()
    model.fit(**arguments, epochs=EPOCHS, verbose=0)
    # Keras has made one more iterator than it has read.
    model.evaluate(arguments["x"], arguments.get("y"), verbose=0, steps=2)
    return model.steps


@pytest.mark.nightly(unless=["endless"])
@pytest.mark.parametrize("name", INPUT)
def test_epochs_read_the_rows_of_keras(name: str) -> None:
    plain = steps(None, name)
    assert len(plain) >= 9 + 2
    assert steps(STRATEGIES["mirrored_2"].make(), name) == plain
    if name == "seed":
        assert steps(ks.OneDeviceStrategy("cpu:0"), name) == plain


#: On each backend: what can be in another order if iterators are made at other times.
AHEAD = {
    "tensorflow": ["unknown length", "validation on the same"],
    "torch": ["arrays", "seed"],
    "jax": ["arrays", "PyDataset"],
}


@pytest.mark.nightly(
    unless=["PyDataset-mirrored_2", "seed-one_device", "unknown length-one_device"]
)
@pytest.mark.parametrize("device", ["one_device", "mirrored_2"])
@pytest.mark.parametrize("name", AHEAD[BACKEND])
def test_with_batches_ahead_on_a_device(name: str, device: str) -> None:
    """As on an accelerator."""
    is_one = device == "one_device"
    strategy = ks.OneDeviceStrategy("cpu:1") if is_one else STRATEGIES[device].make()
    end = prepare_ahead(strategy)
    try:
        found = steps(strategy, name)
    finally:
        end()
    assert found == steps(None, name)
