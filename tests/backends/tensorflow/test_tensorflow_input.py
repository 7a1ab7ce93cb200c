"""TensorFlow: the batches of `fit` are on an accelerator before their step."""

from __future__ import annotations

import gc
import weakref

import keras
import numpy as np
import pytest

import keras_strategies as ks

if keras.backend.backend() != "tensorflow":
    pytest.skip("tests of the TensorFlow backend", allow_module_level=True)

import tensorflow as tf

from keras_strategies.engines.tensorflow.epoch_datasets import (
    EpochDatasets,
    EpochIterator,
)

ks.set_virtual_cpu_devices(4)

X = np.random.default_rng(0).normal(size=(11, 3)).astype("float32")
Y = X.sum(1, keepdims=True)
WEIGHTS = np.linspace(0.5, 2, 11).astype("float32")
DEVICE = "/device:CPU:1"


def model_of(strategy, **options):
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", **options)
    return model


def test_batches_are_on_the_device_when_they_are_asked_for():
    dataset = tf.data.Dataset.from_tensor_slices({"x": X, "i": np.arange(11)}).batch(4)
    found = list(EpochDatasets(DEVICE).dataset(dataset, by_user=True))
    assert [len(batch["i"]) for batch in found] == [4, 4, 3]
    for batch in found:
        assert all(DEVICE in leaf.device for leaf in batch.values())
    np.testing.assert_array_equal(np.concatenate([b["x"] for b in found]), X)


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        return X[4 * index : 4 * index + 4], Y[4 * index : 4 * index + 4]


def users():
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(4)


@pytest.mark.parametrize(
    ("make", "tuned"),
    [
        (lambda: {"x": X, "y": Y, "batch_size": 4}, False),
        (lambda: {"x": Batches(workers=1)}, False),
        (lambda: {"x": users()}, None),
    ],
    ids=["arrays", "PyDataset", "the user's"],
)
def test_only_datasets_of_keras_are_read_without_tuning(make, tuned):
    seen = []
    placer = EpochDatasets(None)

    class Recording:
        def dataset(self, dataset, by_user, *of_this_worker):
            seen.append(placer.dataset(dataset, by_user, *of_this_worker))
            return seen[-1]

    strategy = ks.OneDeviceStrategy("cpu:0")
    assert isinstance(strategy.drivers.fit.placer, EpochDatasets)
    strategy.drivers.fit.placer = Recording()
    model_of(strategy).fit(**make(), shuffle=False, verbose=0)
    datasets = [getattr(epochs, "dataset", epochs) for epochs in seen]
    found = [dataset.options().autotune.enabled for dataset in datasets]
    assert found == [tuned]


@pytest.fixture
def created(monkeypatch):
    """The iterators that TensorFlow creates, one by one."""
    found = []
    original = tf.data.Dataset.__iter__

    def recorded(self):
        found.append(self)
        return original(self)

    monkeypatch.setattr(tf.data.Dataset, "__iter__", recorded)
    return found


def test_each_epoch_creates_one_iterator_and_reads_the_rows_of_keras(created):
    def history(strategy):
        model = model_of(strategy, run_eagerly=True)
        keras.utils.set_random_seed(0)
        given = {"batch_size": 4, "epochs": 3, "verbose": 0}
        result = model.fit(X, Y, sample_weight=WEIGHTS, **given)
        return result.history["loss"]

    plain = history(ks.get_strategy())
    assert len(created) >= 6
    created.clear()
    found = history(ks.OneDeviceStrategy("cpu:0"))
    assert len(created) == 3
    np.testing.assert_allclose(found, plain, rtol=1e-5)


def test_datasets_of_fit_end_with_it_without_a_collection(monkeypatch):
    made = []
    create = EpochIterator.__init__

    def noted(self, *args, **kwargs):
        made.append(weakref.ref(self))
        create(self, *args, **kwargs)

    monkeypatch.setattr(EpochIterator, "__init__", noted)
    model = model_of(ks.OneDeviceStrategy("cpu:0"))
    gc.disable()
    try:
        model.fit(X, Y, batch_size=4, epochs=2, verbose=0)
        model.predict(X, batch_size=4, verbose=0)
        alive = [reference() for reference in made]
    finally:
        gc.enable()
    assert alive and set(alive) == {None}


def test_an_epoch_s_iterator_can_be_passed_to_programs_and_inspected():
    dataset = tf.data.Dataset.range(6)
    iterator = iter(EpochDatasets(None).dataset(dataset, by_user=False))
    assert isinstance(iterator, tf.data.Iterator)
    assert iterator.element_spec == dataset.element_spec

    @tf.function
    def two(batches):
        return next(batches), batches.get_next()

    traced = [int(value) for _ in range(2) for value in two(iterator)]
    assert two.experimental_get_tracing_count() == 1
    assert [*traced, int(next(iterator))] == [0, 1, 2, 3, 4]
    assert iterator.get_next_as_optional().has_value()
    assert not iterator.get_next_as_optional().has_value()
    with pytest.raises(tf.errors.OutOfRangeError):
        iterator.get_next()
    with pytest.raises(StopIteration):
        next(iterator)


@pytest.mark.gpu
def test_fit_on_a_gpu_gets_its_batches_there():
    results = []
    for ahead in (False, True):
        strategy = ks.OneDeviceStrategy("gpu:0")
        if ahead:
            dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(4)
            for x, _ in strategy.drivers.fit.placer.dataset(dataset, by_user=True):
                assert "GPU:0" in x.device
        else:
            strategy.drivers.fit.placer = None
        model = model_of(strategy)
        model.fit(X, Y, batch_size=4, epochs=3, shuffle=False, verbose=0)
        results.append(model.get_weights())
    for plain, moved in zip(*results, strict=True):
        np.testing.assert_allclose(plain, moved, rtol=1e-6)
