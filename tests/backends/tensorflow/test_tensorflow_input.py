"""TensorFlow: the batches of `fit` are on an accelerator before their step."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_strategies as ks
from keras_strategies.engines.tensorflow.epoch_datasets import EpochDatasets

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
