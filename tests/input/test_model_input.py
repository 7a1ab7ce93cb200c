"""Distributed datasets and dataset creators in `fit`, `evaluate` and `predict`."""

from __future__ import annotations

import contextlib

import keras
import numpy as np
import pytest
from harness import data, models
from harness.strategies import STRATEGIES
from harness.training import assert_same, numbers

import keras_strategies as ks

pytestmark = pytest.mark.one_backend

ROWS = 23
DATA = data.classes(ROWS)
X, Y = DATA.x, DATA.y


def batches(size: int = 8) -> list[tuple[np.ndarray, np.ndarray]]:
    return [(X[i : i + size], Y[i : i + size]) for i in range(0, ROWS, size)]


def tf_data(size: int = 8):
    return data.tf_data(data.Data(X, Y), size)["x"]


def loader(size: int = 8):
    return data.loader(data.Data(X, Y), size)["x"]


def forever():
    while True:
        yield from batches()


class Trained:
    """A model that starts each training as it was made, with the programs it has."""

    def __init__(self, strategy=None) -> None:
        keras.utils.set_random_seed(3)
        with strategy.scope() if strategy is not None else contextlib.nullcontext():
            self.model = models.dense()
            loss = "sparse_categorical_crossentropy"
            self.model.compile(keras.optimizers.SGD(0.1), loss, metrics=["accuracy"])
        self._start = self.model.get_weights()

    def __call__(self, x, **options):
        self.model.set_weights(self._start)
        self.model.optimizer.iterations.assign(0)
        history = self.model.fit(x, epochs=2, shuffle=False, verbose=0, **options)
        return numbers(self.model, history)

    def scores(self, x, y=None, **options):
        """What `evaluate` and `predict` give."""
        found = self.model.evaluate(x, y, verbose=0, **options)
        return numbers(self.model, None, found, self.model.predict(x, verbose=0))


@pytest.fixture(scope="module")
def mirrored():
    return STRATEGIES["mirrored_2"].make()


@pytest.fixture(scope="module")
def train(mirrored) -> Trained:
    return Trained(mirrored)


@pytest.fixture(scope="module")
def train_alone() -> Trained:
    return Trained()


@pytest.fixture(scope="module")
def alone():
    """One device, on the same global batches."""
    validation = {"validation_data": (X, Y), "validation_batch_size": 8}
    return Trained()(X, y=Y, batch_size=8, **validation)


#: A creator that does not ask about replicas knows of global batches only; with two
#: batches of four for a global one of eight, the last has seven rows.
WAYS = {
    "split": lambda strategy, make: strategy.experimental_distribute_dataset(make()),
    "replicas": lambda strategy, make: strategy.distribute_datasets_from_function(
        lambda context: make(context.get_per_replica_batch_size(8))
    ),
    "creator": lambda strategy, make: ks.DatasetCreator(lambda context: make(8)),
    "creator of the replicas": lambda strategy, make: ks.DatasetCreator(
        lambda context: make(context.get_per_replica_batch_size(8)), ks.InputOptions()
    ),
}


@pytest.mark.nightly(unless=["*-batches"])
@pytest.mark.parametrize("make", [tf_data, loader, batches], ids=lambda f: f.__name__)
@pytest.mark.parametrize("way", WAYS)
def test_methods_on_a_dataset(mirrored, train, alone, way, make) -> None:
    dataset = WAYS[way](mirrored, make)
    assert_same(alone, train(dataset, validation_data=dataset), 1e-5, way)
    expected = train.scores(X, Y, batch_size=8)
    assert_same(expected, train.scores(dataset), 1e-5, way)


def test_creator_of_a_dataset_for_each_replica(mirrored, train, train_alone) -> None:
    parts = iter([batches(4)[0:4:2], batches(4)[1:4:2]])
    each = ks.InputOptions(experimental_replication_mode="PER_REPLICA")
    creator = ks.DatasetCreator(lambda context: next(parts), each)
    expected = train_alone(X[:16], y=Y[:16], batch_size=8)
    assert_same(expected, train(creator), 1e-5, "two replicas")


def test_a_generator_and_class_weights(mirrored, train, train_alone) -> None:
    """It goes on from epoch to epoch."""
    distribute = mirrored.experimental_distribute_dataset
    weights = {0: 1.0, 1: 2.0, 2: 0.5}
    expected = train_alone(forever(), steps_per_epoch=2)
    found = train(distribute(forever()), steps_per_epoch=2)
    assert_same(expected, found, 1e-5, "two replicas")
    expected = train_alone(X, y=Y, batch_size=8, class_weight=weights)
    found = train(distribute(batches()), class_weight=weights)
    assert_same(expected, found, 1e-5, "two replicas")


def test_targets_beside_a_dataset(mirrored, train) -> None:
    distributed = mirrored.experimental_distribute_dataset(batches())
    with pytest.raises(ValueError, match=r"`y` was given with `x`, a Distributed"):
        train.model.fit(distributed, Y)
    with pytest.raises(ValueError, match="`sample_weight` was given with"):
        train.model.evaluate(distributed, sample_weight=Y)
    weighted = mirrored.experimental_distribute_dataset([(X, Y, np.ones(len(X)))])
    with pytest.raises(ks.errors.InvalidArgumentError, match=r"weight=\{0.*Only"):
        train.model.fit(weighted, class_weight={0: 1.0, 1: 2.0, 2: 0.5}, verbose=0)
