"""Distributed datasets and dataset creators in `fit`, `evaluate` and `predict`."""

from __future__ import annotations

import contextlib

import keras
import numpy as np
import pytest
from harness.strategies import STRATEGIES

import keras_strategies as ks

pytestmark = pytest.mark.one_backend

ROWS = 23
X = np.random.default_rng(0).normal(size=(ROWS, 6)).astype("float32")
Y = np.random.default_rng(1).integers(0, 3, ROWS)


def batches(size: int = 8) -> list[tuple[np.ndarray, np.ndarray]]:
    return [(X[i : i + size], Y[i : i + size]) for i in range(0, ROWS, size)]


def build() -> keras.Model:
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(8, activation="tanh"),
            keras.layers.Dense(3, activation="softmax"),
        ]
    )
    optimizer = keras.optimizers.SGD(0.1)
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


class Trained:
    """A model that starts each training as it was made, with the programs it has."""

    def __init__(self, strategy=None) -> None:
        with strategy.scope() if strategy is not None else contextlib.nullcontext():
            self.model = build()
        self._start = self.model.get_weights()

    def __call__(self, x, validation=None, **options):
        self.model.set_weights(self._start)
        self.model.optimizer.iterations.assign(0)
        if validation is not None:
            options["validation_data"] = validation
        history = self.model.fit(x, epochs=2, shuffle=False, verbose=0, **options)
        return self.model, history.history


def assert_equal(found, expected) -> None:
    (model, history), (alone, reference) = found, expected
    assert history.keys() == reference.keys()
    for key, values in reference.items():
        np.testing.assert_allclose(history[key], values, rtol=1e-5, err_msg=key)
    for mine, theirs in zip(model.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)


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
    train = Trained()
    return train(X, (X, Y), y=Y, batch_size=8, validation_batch_size=8)


def tf_data(size: int = 8):
    tf = pytest.importorskip("tensorflow")
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(size)


def loader(size: int = 8):
    torch = pytest.importorskip("torch")
    rows = list(zip(X, Y, strict=True))
    return torch.utils.data.DataLoader(rows, batch_size=size)


DATASETS = {"tf_data": tf_data, "loader": loader, "list": batches}


def on_datasets(*names: str) -> pytest.MarkDecorator:
    """Runs a test on these datasets, and each night on all the others.

    `test_datasets.py` is about the batches of each kind, which reach a trainer in one
    form: so each function here is tested with one kind, and with `tf.data` where Keras
    itself or a trainer reads it.
    """
    cases = [
        pytest.param(make, id=name, marks=[] if name in names else pytest.mark.nightly)
        for name, make in DATASETS.items()
    ]
    return pytest.mark.parametrize("dataset", cases)


@pytest.mark.nightly(unless=["list"])
@on_datasets("tf_data", "list")
def test_fit_on_a_split_dataset(mirrored, train, dataset, alone) -> None:
    distributed = mirrored.experimental_distribute_dataset(dataset())
    found = train(distributed, distributed)
    assert_equal(found, alone)
    model, _ = found
    expected = model.evaluate(X, Y, batch_size=8, verbose=0)
    np.testing.assert_allclose(model.evaluate(distributed, verbose=0), expected, 1e-5)
    predicted = model.predict(distributed, verbose=0)
    np.testing.assert_allclose(predicted, model.predict(X, verbose=0), 1e-5)


def test_fit_on_rows_of_arrays(mirrored, train, alone) -> None:
    rows = mirrored.make_experimental_numpy_dataset((X, Y)).batch(8)
    assert_equal(train(rows, rows), alone)
    distributed = mirrored.experimental_distribute_dataset(rows)
    assert_equal(train(distributed, distributed), alone)


@on_datasets("list")
def test_fit_on_the_replicas_batches(mirrored, train, dataset, alone) -> None:
    """Two batches of four are a global batch of eight; the last has seven rows."""
    distributed = mirrored.distribute_datasets_from_function(
        lambda context: dataset(context.get_per_replica_batch_size(8))
    )
    assert_equal(train(distributed, distributed), alone)


@pytest.mark.one_backend("jax")
@pytest.mark.nightly(unless=["one_device", "mirrored_2"])
@pytest.mark.parametrize(
    "name",
    [
        "one_device",  # Batches as they are.
        "mirrored_2",  # Batches of two replicas.
        *(["fsdp_2x2"] if "fsdp_2x2" in STRATEGIES else []),  # Joined for a mesh.
        pytest.param("mirrored_4", marks=pytest.mark.nightly),
        pytest.param("central", marks=pytest.mark.nightly),
    ],
)
def test_creator_of_the_replicas_batches(name, alone) -> None:
    strategy = STRATEGIES[name].make()
    contexts = []

    def dataset_fn(context):
        contexts.append(context)
        return batches(context.get_per_replica_batch_size(8))

    creator = ks.DatasetCreator(dataset_fn, ks.InputOptions())
    assert_equal(Trained(strategy)(creator, creator), alone)
    assert len(contexts) == 2
    assert contexts[0].num_input_pipelines == 1
    assert contexts[0].num_replicas_in_sync == strategy.num_replicas_in_sync


@on_datasets("list")
def test_creator_of_global_batches(train, dataset, alone) -> None:
    """A function that does not ask about replicas knows of global batches only."""

    def dataset_fn(context):
        assert "num_replicas_in_sync=2" in repr(context)
        assert context.num_input_pipelines == 1
        return dataset(8)

    creator = ks.DatasetCreator(dataset_fn)
    found = train(creator, creator)
    assert_equal(found, alone)
    model, _ = found
    expected = model.evaluate(X, Y, batch_size=8, verbose=0)
    np.testing.assert_allclose(model.evaluate(creator, verbose=0), expected, 1e-5)
    predicted = model.predict(x=creator, verbose=0)
    np.testing.assert_allclose(predicted, model.predict(X, verbose=0), 1e-5)


@on_datasets("tf_data", "list")
def test_creator_without_a_strategy(train_alone, dataset, alone) -> None:
    creator = ks.DatasetCreator(lambda c: dataset(c.get_per_replica_batch_size(8)))
    assert_equal(train_alone(creator, creator), alone)


def test_creator_of_a_dataset_for_each_replica(mirrored) -> None:
    parts = iter([batches(4)[0:4:2], batches(4)[1:4:2]])
    creator = ks.DatasetCreator(
        lambda context: next(parts),
        ks.InputOptions(experimental_replication_mode="PER_REPLICA"),
    )
    with mirrored.scope():
        model = build()
    model.fit(creator, shuffle=False, verbose=0)
    alone = build()
    alone.fit(X[:16], Y[:16], batch_size=8, shuffle=False, verbose=0)
    for mine, theirs in zip(model.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)


def test_endless_datasets_with_steps(train, train_alone) -> None:
    def dataset_fn(context):
        return tf_data(context.get_per_replica_batch_size(8)).repeat()

    found = train(ks.DatasetCreator(dataset_fn), steps_per_epoch=3)

    def endless():
        while True:
            yield from batches(4)

    def joined():
        parts = endless()
        while True:
            pair = next(parts), next(parts)
            yield tuple(np.concatenate(part) for part in zip(*pair, strict=True))

    assert_equal(found, train_alone(joined(), steps_per_epoch=3))


def test_a_generator_goes_on_from_epoch_to_epoch(mirrored, train, train_alone) -> None:
    def endless():
        while True:
            yield from batches()

    distributed = mirrored.experimental_distribute_dataset(endless())
    found = train(distributed, steps_per_epoch=2)
    assert_equal(found, train_alone(endless(), steps_per_epoch=2))


def test_class_weight(mirrored, train, train_alone) -> None:
    weights = {0: 1.0, 1: 2.0, 2: 0.5}
    distributed = mirrored.experimental_distribute_dataset(batches())
    found = train(distributed, class_weight=weights)
    expected = train_alone(X, y=Y, batch_size=8, class_weight=weights)
    assert_equal(found, expected)


def test_targets_beside_a_dataset(mirrored) -> None:
    with mirrored.scope():
        model = build()
    distributed = mirrored.experimental_distribute_dataset(batches())
    with pytest.raises(ValueError, match=r"`y` was given with `x`, a Distributed"):
        model.fit(distributed, Y)
    with pytest.raises(ValueError, match="`sample_weight` was given with"):
        model.evaluate(distributed, sample_weight=Y)
    weighted = [(X, Y, np.ones(len(X)))]
    distributed = mirrored.experimental_distribute_dataset(weighted)
    with pytest.raises(ks.errors.InvalidArgumentError, match=r"weight=\{0.*Only"):
        model.fit(distributed, class_weight={0: 1.0, 1: 2.0, 2: 0.5}, verbose=0)


def test_wrong_arguments_are_still_keras_to_refuse(mirrored) -> None:
    with mirrored.scope():
        model = build()
    with pytest.raises(TypeError, match="no_such_argument"):
        model.fit(X, Y, no_such_argument=3)
    with pytest.raises(TypeError, match="optimiser"):
        model.compile(optimiser="sgd")


def test_a_creator_that_makes_no_dataset(mirrored) -> None:
    with mirrored.scope():
        model = build()
    with pytest.raises(ValueError, match="is not a dataset"):
        model.fit(ks.DatasetCreator(lambda context: None))
