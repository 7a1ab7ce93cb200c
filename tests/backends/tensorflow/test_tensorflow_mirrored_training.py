"""TensorFlow: training, files and exports of mirrored variables leave equal copies."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras import layers

import keras_strategies as ks

if keras.backend.backend() != "tensorflow":
    pytest.skip("tests of the TensorFlow backend", allow_module_level=True)

import tensorflow as tf
from backends.tensorflow.tensorflow_mirrors import ONES, START, assert_everywhere

ks.set_virtual_cpu_devices(4)


def small_model():
    return keras.Sequential(
        [
            keras.Input((4,), dtype="int32"),
            layers.Embedding(10, 3),
            layers.Flatten(),
            layers.Dense(5, activation="relu"),
            layers.BatchNormalization(),
            layers.Dropout(0.2),
            layers.Dense(1),
        ]
    )


X = np.random.default_rng(0).integers(0, 10, (16, 4)).astype("int32")
Y = np.random.default_rng(1).normal(size=(16, 1)).astype("float32")


def fitted(strategy, optimizer="adam", **options):
    with strategy.scope():
        model = small_model()
        model.compile(optimizer, "mse", **options)
    model.fit(X, Y, batch_size=8, verbose=0)
    return model


@pytest.fixture(scope="module")
def trained():
    """A model on two replicas, after `fit`; tests leave its weights as they are."""
    strategy = ks.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        optimizer = keras.optimizers.Adam(0.1, clipnorm=1.0, use_ema=True)
    return strategy, fitted(strategy, optimizer, metrics=["mae"])


def assert_all_are_equal(model) -> None:
    assert model.variables
    for variable in model.variables:
        assert_everywhere(variable, variable.numpy())


# By what each does to a variable: assign it, in a conditional, or by rows.
OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9, weight_decay=0.1),
    "adam": lambda: keras.optimizers.Adam(0.1, clipnorm=1.0, use_ema=True),
    "accumulation": lambda: keras.optimizers.Adam(0.1, gradient_accumulation_steps=2),
    "loss_scale": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.RMSprop(0.1)
    ),
    "lion": lambda: keras.optimizers.Lion(0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_leave_equal_copies(strategy, name):
    with strategy.scope():
        kernel, table = (keras.Variable(START) for _ in range(2))
        optimizer = OPTIMIZERS[name]()
        optimizer.build([kernel, table])

    # As a lookup in the table has it, with the shape of the table.
    two_rows = tf.constant([[7, 8], [2, 4], [7, 8]], "float32")
    by_rows = tf.IndexedSlices(two_rows, tf.constant([2, 0, 2]), tf.constant([3, 2]))

    @tf.function
    def step():
        optimizer.apply([tf.constant(ONES), by_rows], [kernel, table])

    for _ in range(2):
        step()
    for variable in (kernel, table):
        assert not np.array_equal(variable.numpy(), START)
        assert_everywhere(variable, variable.numpy())


def test_fit_leaves_equal_copies(trained):
    assert_all_are_equal(trained[1])


def test_eager_steps_leave_equal_copies(strategy):
    assert_all_are_equal(fitted(strategy, run_eagerly=True))


def test_weights_files_and_models_restore_every_copy(trained, tmp_path):
    strategy, model = trained
    expected = model.get_weights()
    model.save_weights(tmp_path / "all.weights.h5")
    model.save(tmp_path / "all.keras")

    def forget():
        model.set_weights([np.zeros_like(w) for w in expected])
        assert_all_are_equal(model)

    def assert_restored(found):
        assert_all_are_equal(found)
        for a, b in zip(found.get_weights(), expected, strict=True):
            np.testing.assert_array_equal(a, b)

    forget()
    model.load_weights(tmp_path / "all.weights.h5")
    assert_restored(model)
    forget()
    model.set_weights(expected)
    assert_restored(model)
    with strategy.scope():
        loaded = keras.models.load_model(tmp_path / "all.keras")
    assert_restored(loaded)


def test_checkpoints_restore_every_copy(trained, tmp_path):
    _, model = trained
    expected = model.get_weights()
    path = tf.train.Checkpoint(model=model).save(tmp_path / "checkpoint")
    model.set_weights([np.zeros_like(w) for w in expected])
    tf.train.Checkpoint(model=model).restore(path)
    for a, b in zip(model.get_weights(), expected, strict=True):
        np.testing.assert_array_equal(a, b)
    assert_all_are_equal(model)
