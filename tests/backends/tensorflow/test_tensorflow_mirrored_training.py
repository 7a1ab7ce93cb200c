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
from backends.tensorflow.tensorflow_mirrors import (
    ONES,
    START,
    assert_everywhere,
    copies_of,
)

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


@pytest.mark.nightly
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fit_leaves_equal_copies_with_every_optimizer(strategy, name):
    assert_all_are_equal(fitted(strategy, OPTIMIZERS[name]()))


# Eager steps assign at once. Several steps in an execution are the same program.
@pytest.mark.parametrize(
    "options",
    [
        {"run_eagerly": True},
        pytest.param({"steps_per_execution": 2}, marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_fit_leaves_equal_copies_however_it_runs(strategy, options):
    assert_all_are_equal(fitted(strategy, **options))


def test_optimizers_and_metrics_keep_no_copies(trained):
    _, model = trained
    for variable in [*model.optimizer.variables, *model.metrics_variables]:
        assert list(copies_of(variable)) == ["cpu:0"], variable.path


def test_describe_shows_the_copies(trained):
    strategy, model = trained
    table = str(strategy.describe(model))
    (line,) = [line for line in table.splitlines() if "/embeddings " in line]
    assert "cpu:0, cpu:1" in line
    (line,) = [line for line in table.splitlines() if "/learning_rate " in line]
    assert "cpu:0" in line and "cpu:1" not in line


@pytest.mark.parametrize("compiled", [False, True])
def test_an_own_step_leaves_equal_copies(strategy, compiled):
    with strategy.scope():
        model = small_model()
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build(model.trainable_variables)

    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(X, training=True) - Y) ** 2)
        gradients = tape.gradient(loss, model.trainable_weights)
        assert isinstance(gradients[0], tf.IndexedSlices)
        optimizer.apply_gradients(zip(gradients, model.trainable_weights, strict=True))
        return loss

    step = tf.function(step) if compiled else step
    losses = [float(step()) for _ in range(3)]
    assert losses[2] < losses[0]
    assert_all_are_equal(model)


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


def test_checkpoints_of_raw_variables_restore_every_copy(variable, tmp_path):
    checkpoint = tf.train.Checkpoint(kernel=variable.value)
    path = checkpoint.save(tmp_path / "checkpoint")
    variable.assign(START * 0)
    checkpoint.restore(path).assert_consumed()
    assert_everywhere(variable, START)
    reader = tf.train.load_checkpoint(path)
    assert len([k for k in reader.get_variable_to_shape_map() if "kernel" in k]) == 1


def test_a_checkpoint_that_waits_for_a_variable_fills_every_copy(
    strategy, variable, tmp_path
):
    path = tf.train.Checkpoint(kernel=variable).save(tmp_path / "checkpoint")
    later = tf.train.Checkpoint()
    later.restore(path)
    with strategy.scope():
        other = keras.Variable(START * 0)
    later.kernel = other
    assert_everywhere(other, START)


def test_exported_programs_assign_what_has_no_copies(strategy, variable, tmp_path):
    class Counter(tf.Module):
        def __init__(self):
            self.kernel = variable.value

        @tf.function(input_signature=[tf.TensorSpec([], "float32")])
        def add(self, number):
            return self.kernel.assign_add(number * ONES)

    module = Counter()
    tf.saved_model.save(module, str(tmp_path / "saved"))
    loaded = tf.saved_model.load(str(tmp_path / "saved"))
    np.testing.assert_array_equal(loaded.add(2.0), START + 2)
    np.testing.assert_array_equal(loaded.kernel, START + 2)
    assert_everywhere(variable, START)


def test_exported_models_predict_the_same(trained, tmp_path):
    _, model = trained
    expected = model.predict(X, verbose=0)
    model.export(tmp_path / "exported", verbose=False)
    loaded = tf.saved_model.load(str(tmp_path / "exported"))
    np.testing.assert_allclose(loaded.serve(X), expected, rtol=1e-5, atol=1e-6)
