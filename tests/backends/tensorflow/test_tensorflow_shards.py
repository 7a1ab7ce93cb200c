"""Sharded variables on TensorFlow: reads, assignments, gradients, updates, gathers."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from harness.data import classes
from harness.strategies import MODEL_PARALLEL
from keras import layers, optimizers

import keras_strategies as ks
from keras_strategies.engines.tensorflow.sharding.variables_in_shards import (
    VariableInShards,
)
from keras_strategies.keras_compat.variables.values import raw_value

ks.set_virtual_cpu_devices(4)

START = np.arange(64, dtype="float32").reshape(8, 8) / 8


@pytest.fixture(params=["fsdp_4", "model_2x2", "fsdp_2x2"])
def table(request):
    with MODEL_PARALLEL[request.param].make().scope():
        return keras.Variable(START, name="table").value


ROWS = tf.IndexedSlices(tf.ones((3, 8)), tf.constant([7, 0, 7]))
CHANGES = {
    "assign": lambda v: v.assign(v * 2),
    "assign_add": lambda v: v.assign_add(v),
    "assign_sub": lambda v: v.assign_sub(v + 1, read_value=False),
    "scatter_add": lambda v: v.scatter_add(ROWS),
    "scatter_update": lambda v: v.scatter_update(ROWS),
    "scatter_max": lambda v: v.scatter_max(ROWS),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("wrap", [lambda f: f, tf.function], ids=["eager", "program"])
def test_an_assignment_is_that_of_one_variable(table, change, wrap) -> None:
    plain = tf.Variable(START)
    for each in (plain, table):
        wrap(lambda v=each: (CHANGES[change](v), None)[1])()
    np.testing.assert_array_equal(table.numpy(), plain.numpy())
    np.testing.assert_array_equal(table.sparse_read([3]), plain.sparse_read([3]))


def test_slices_and_entries_are_not_assigned(table) -> None:
    with pytest.raises(ks.errors.ContextError, match="Assign a value of its shape"):
        table[1:3, 2].assign([5.0, 6.0])
    with pytest.raises(ks.errors.ContextError, match="is in shards"):
        table.scatter_nd_add([[0, 0], [7, 1]], [9.0, 8.0])
    np.testing.assert_array_equal(table.numpy(), START)


def test_a_read_follows_the_assignment_in_a_branch(table) -> None:
    @tf.function
    def program():
        def branch():
            table.assign(table * 2)
            return table + 0

        return tf.cond(tf.constant(True), branch, lambda: table + 0), table + 0

    for value in program():
        np.testing.assert_array_equal(value, 2 * START)


@tf.function
def squares(value):
    return tf.reduce_sum(value * value)


def in_a_loop(value):
    def body(i, total):
        return i + 1, total + tf.reduce_sum(value * value) / 3

    return tf.while_loop(lambda i, _: i < 3, body, [0, 0.0])[1]


LOSSES = {
    "direct": lambda v: tf.reduce_sum(v * v),
    "in an inner program": lambda v: tf.function(lambda: tf.reduce_sum(v * v))(),
    "as an argument": squares,
    "in a loop": in_a_loop,
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("wrap", [lambda f: f, tf.function], ids=["eager", "program"])
def test_the_gradient_is_that_of_the_unsharded_value(table, loss, wrap) -> None:
    @wrap
    def gradient():
        with tf.GradientTape() as tape:
            value = LOSSES[loss](table)
        return tape.gradient(value, table)

    np.testing.assert_allclose(gradient(), 2 * START, rtol=1e-6)


def test_a_weight_assigned_after_the_forward_pass_has_the_gradient_of_before() -> None:
    class Assigning(keras.Sequential):
        def train_step(self, data):
            x, _ = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(self(x, training=True) ** 2)
            kernel = self.layers[-1].kernel
            kernel.assign(kernel * 2.0)
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply(gradients, self.trainable_variables)
            return {"loss": loss}

    found = []
    x = np.random.default_rng(0).normal(size=(16, 4)).astype("float32")
    for strategy in (ks.OneDeviceStrategy("cpu:0"), MODEL_PARALLEL["fsdp_2x2"].make()):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            dense = [layers.Dense(16, name="up"), layers.Dense(8, name="down")]
            model = Assigning([keras.Input((4,)), *dense])
            model.compile(optimizers.SGD(0.1))
        model.fit(x, x, batch_size=8, shuffle=False, verbose=0)
        found.append(model.get_weights())
    for a, b in zip(*found, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_files_of_tensorflow(tmp_path) -> None:
    widths = ((16, "relu"), (16, "relu"), (8, "softmax"))
    with MODEL_PARALLEL["fsdp_2x2"].make().scope():
        dense = [layers.Dense(*each) for each in widths]
        model = keras.Sequential([keras.Input((6,)), *dense])
        model.compile(optimizers.Adam(0.01), "sparse_categorical_crossentropy")
    rows, x = classes(22), classes(8).x
    model.fit(rows.x, rows.y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    expected = model.predict(x, verbose=0)
    model.export(tmp_path / "exported", verbose=False)
    loaded = tf.saved_model.load(tmp_path / "exported")
    np.testing.assert_allclose(loaded.serve(x), expected, rtol=1e-5)
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    path = checkpoint.write(str(tmp_path / "checkpoint"))
    model.set_weights([np.zeros_like(weight) for weight in model.get_weights()])
    checkpoint.read(path).assert_consumed()
    np.testing.assert_allclose(model.predict(x, verbose=0), expected, rtol=1e-6)


def test_transposed_arrays_are_assigned_to_shards() -> None:
    strategy = ks.ModelParallelStrategy("fsdp", ["cpu:0", "cpu:1"], min_shard_bytes=0)
    with strategy.scope():
        variable = keras.Variable(np.zeros((4, 6, 8), "float32"))
    assert isinstance(raw_value(variable), VariableInShards)
    array = np.random.default_rng(1).normal(size=(4, 8, 6)).astype("float32")
    variable.assign(array.transpose(0, 2, 1))
    found = keras.ops.convert_to_numpy(variable)
    np.testing.assert_array_equal(found, array.transpose(0, 2, 1))
