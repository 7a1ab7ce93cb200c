"""Replicas on TensorFlow with operations copied from another replica."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras import layers, ops

import keras_strategies as ks

if keras.backend.backend() != "tensorflow":
    pytest.skip("tests of the TensorFlow backend", allow_module_level=True)

import tensorflow as tf

from keras_strategies.engines.tensorflow.data_parallel.graph_copies import ReplicaTraces
from keras_strategies.runtime.data_parallel.data_parallel_call import DataParallelCall

ks.set_virtual_cpu_devices(4)
# The replicas that were traced; layers that count their calls are not split.
_traces = []


@pytest.fixture(autouse=True)
def traced_replicas(monkeypatch):
    tracing = ReplicaTraces.tracing

    def recorded(traces, replica_id, was_used_by):
        _traces.append(replica_id)
        return tracing(traces, replica_id, was_used_by)

    def not_recorded(*args, **kwargs):
        count = len(_traces)
        found = on_row_parts(*args, **kwargs)
        del _traces[count:]
        return found

    # The traces of losses and metrics are left out.
    on_row_parts = DataParallelCall.on_row_parts
    monkeypatch.setattr(DataParallelCall, "on_row_parts", not_recorded)
    monkeypatch.setattr(ReplicaTraces, "tracing", recorded)


class Counted(layers.Layer):
    """A dense layer that counts its calls in a variable."""

    def __init__(self, then=None, **arguments):
        super().__init__(**arguments)
        self.then = as_layer(then)

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], 3), name="kernel")
        self.calls = self.add_weight(
            shape=(), name="calls", trainable=False, initializer="zeros"
        )

    def call(self, x):
        self.calls.assign_add(1.0)
        self.add_loss(0.01 * ops.sum(ops.square(x @ self.kernel)))
        return self.then(ops.tanh(x @ self.kernel))


class Normalized(Counted):
    """Normalizes batches twice: replicas exchange statistics, and their gradients.

    Args:
        between: function of tensors that is called between the normalizations.
        then: function of tensors that is called after them.
    """

    def __init__(self, between=None, then=None, **arguments):
        super().__init__(then, **arguments)
        self.between = as_layer(between)

    def build(self, shape):
        self.norms = [layers.BatchNormalization() for _ in range(2)]
        for norm in self.norms:
            norm.build((*shape[:-1], 3))
        super().build(shape)

    def call(self, x, training=None):
        x = self.between(self.norms[0](x @ self.kernel, training=training))
        self.calls.assign_add(1.0)
        return self.then(self.norms[1](ops.tanh(x), training=training))


@ks.row_wise
class Function(layers.Layer):
    """Calls a function with code of TensorFlow."""

    def __init__(self, function, **arguments):
        super().__init__(**arguments)
        self.function = function

    def call(self, x):
        return self.function(x)


def scaled_gradient(x):
    """A custom gradient that refers to a tensor of its own call."""
    factor = ops.exp(x)

    @tf.custom_gradient
    def identity(x):
        return tf.identity(x), lambda gradient: gradient * factor

    return identity(x)


def in_a_loop(x):
    return tf.while_loop(lambda i, x: i < 2, lambda i, x: (i + 1, x * x), (0, x))[1]


@tf.function(reduce_retracing=True)
def in_a_program(x):
    return ops.sin(x) * x


def as_layer(function):
    if function is None:
        return lambda x: x
    return function if function is centered else Function(function)


def two():
    return ks.MirroredStrategy(["cpu:0", "cpu:1"])


def four():
    return ks.MirroredStrategy([f"cpu:{i}" for i in range(4)])


def trained(strategy, then=None, rows=24, batch_size=8):
    random = np.random.default_rng(0)
    x = random.normal(size=(rows, 4)).astype("float32")
    y = random.normal(size=(rows, 1)).astype("float32")
    keras.utils.set_random_seed(3)
    with strategy.scope():
        layer = Counted(then)
        model = keras.Sequential(
            [
                keras.Input((4,)),
                layers.Embedding(5, 4) if then is None else layers.Dense(4),
                *([layers.Lambda(lambda x: x[:, 0])] if then is None else []),
                layer,
                layers.Dense(1, kernel_constraint="max_norm"),
            ]
        )
        model.compile(keras.optimizers.Adam(0.05), "mse", weighted_metrics=["mae"])
    if then is None:
        x = random.integers(0, 5, size=(rows, 4))
    before = len(_traces)
    history = model.fit(x, y, batch_size, epochs=2, shuffle=False, verbose=0).history
    return model.get_weights(), history, len(_traces) - before


def assert_same(found, expected):
    for a, b in zip(found[0], expected[0], strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6)
    for name, values in expected[1].items():
        np.testing.assert_allclose(found[1][name], values, rtol=1e-5, err_msg=name)


@pytest.mark.nightly(unless=["None"])
@pytest.mark.parametrize("then", [None, scaled_gradient])
def test_a_copied_replica_computes_what_a_traced_one_does(then):
    found = trained(two(), then)
    assert_same(found, trained(ks.OneDeviceStrategy("cpu:0"), then))
    assert found[2] == 1


@pytest.mark.parametrize(
    "then", [in_a_program, pytest.param(in_a_loop, marks=pytest.mark.nightly)]
)
def test_functions_in_operations_are_traced_for_each_replica(then):
    found = trained(two(), then)
    assert_same(found, trained(ks.OneDeviceStrategy("cpu:0"), then))
    assert found[2] >= 2


@pytest.mark.nightly
@pytest.mark.parametrize("rows", [27, pytest.param(24, marks=pytest.mark.nightly)])
def test_four_replicas_with_uneven_rows(rows):
    found = trained(four(), scaled_gradient, rows, batch_size=8)
    one = trained(ks.OneDeviceStrategy("cpu:0"), scaled_gradient, rows, batch_size=8)
    assert_same(found, one)


def centered(x):
    """Subtracts the mean of all replicas' rows, by a collective of the user's."""
    replica = ks.get_replica_context()
    every = x if replica is None else replica.all_gather(x, axis=0)
    return ops.square(x - ops.mean(every, axis=0))


def normalized(strategy, between, then, eager=False):
    """Weights and traces after two steps on 11 rows."""
    random = np.random.default_rng(0)
    x = random.normal(size=(11, 4)).astype("float32")
    keras.utils.set_random_seed(3)
    with strategy.scope():
        layer = Normalized(between, then)
        model = keras.Sequential([keras.Input((4,)), layer])
        # With one step, Keras 3.16 has programs for 11 rows, which no copies have.
        steps = {} if eager else {"steps_per_execution": 2}
        model.compile(keras.optimizers.SGD(0.5), "mse", run_eagerly=eager, **steps)
    before = len(_traces)
    data = tf.data.Dataset.from_tensor_slices((x, x[:, :3])).batch(11).repeat(2)
    model.fit(data, epochs=1, verbose=0)
    return model.get_weights(), len(_traces) - before


ONLY_NIGHTLY = pytest.mark.nightly


@pytest.mark.nightly(unless=["scaled_gradient-centered-2-1"])
@pytest.mark.parametrize(
    ("between", "then", "count", "traces"),
    [
        (scaled_gradient, centered, 2, 1),
        # The second replica is traced after what it has exchanged as a copy.
        (None, in_a_program, 2, 2),
        pytest.param(in_a_program, scaled_gradient, 2, 2, marks=ONLY_NIGHTLY),
        pytest.param(scaled_gradient, None, 4, 1, marks=ONLY_NIGHTLY),
        pytest.param(scaled_gradient, in_a_program, 4, 4, marks=ONLY_NIGHTLY),
    ],
)
def test_copies_exchange_statistics(between, then, count, traces):
    strategy = ks.MirroredStrategy([f"cpu:{i}" for i in range(count)])
    found = normalized(strategy, between, then)
    one = normalized(ks.OneDeviceStrategy("cpu:0"), between, then, eager=True)
    for own, expected in zip(found[0], one[0], strict=True):
        np.testing.assert_allclose(own, expected, rtol=1e-5, atol=2e-6)
    assert found[1] == traces


class TwoGradients(keras.Model):
    """A step with a tape outside of a program, or with two gradients of one tape."""

    def __init__(self, is_program):
        super().__init__()
        self.counted = Counted(scaled_gradient)
        self.is_program = is_program

    def build(self, shape):
        self.counted.build(shape)
        self.built = True

    def call(self, x):
        return self.counted(x)

    def train_step(self, data):
        x, y = data
        forward = tf.function(self.call_all) if self.is_program else self.call_all
        values = [variable.value for variable in self.trainable_variables]
        with tf.GradientTape(persistent=not self.is_program) as tape:
            outputs = forward(x)
            losses = [ops.mean(ops.square(outputs - y)), ops.mean(outputs)]
        found = tape.gradient(losses[0], values)
        if not self.is_program:
            second = tape.gradient(losses[1], values)
            found = [a + b for a, b in zip(found, second, strict=True)]
        self.optimizer.apply(found, self.trainable_variables)
        return {"loss": losses[0]}

    def call_all(self, x):
        return self(x, training=True)


@pytest.mark.nightly(unless=["True"])
@pytest.mark.parametrize("is_program", [True, False])
def test_gradients_of_copies_that_other_programs_ask_for(is_program):
    x = np.random.default_rng(0).normal(size=(16, 4)).astype("float32")
    found = []
    before = len(_traces)
    for strategy in (ks.OneDeviceStrategy("cpu:0"), two()):
        keras.utils.set_random_seed(3)
        with strategy.scope():
            model = TwoGradients(is_program)
            model.build((None, 4))
            model.compile(keras.optimizers.SGD(0.1))
        model.fit(x, x[:, :1], batch_size=8, epochs=2, shuffle=False, verbose=0)
        found.append(model.get_weights())
    # One of the two replicas; the other one is a copy.
    assert len(_traces) - before == 1
    for expected, own in zip(*found, strict=True):
        np.testing.assert_allclose(own, expected, rtol=1e-5, atol=1e-6)


class InFunction(layers.Layer):
    """Calls a `tf.function` that reads a variable."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], 3))

    @tf.function(reduce_retracing=True)
    def product(self, x):
        return ops.tanh(x @ self.kernel)

    def call(self, x):
        return self.product(x)


@pytest.mark.nightly(unless=["16"])
@pytest.mark.parametrize("rows", [16, 11])
def test_functions_keep_no_traces_of_replicas(rows):
    x = np.random.default_rng(0).normal(size=(rows, 4)).astype("float32")
    found = []
    for strategy in (ks.OneDeviceStrategy("cpu:0"), two()):
        keras.utils.set_random_seed(3)
        with strategy.scope():
            model = keras.Sequential([keras.Input((4,)), InFunction()])
            model.compile(keras.optimizers.SGD(0.5), "mse")
        # The programs of `predict` and `fit` have their own copies of the variable.
        model.predict(x, batch_size=8, verbose=0)
        model.fit(x, x[:, :3], batch_size=8, epochs=2, shuffle=False, verbose=0)
        found.append(model.get_weights())
    for expected, own in zip(*found, strict=True):
        np.testing.assert_allclose(own, expected, rtol=1e-5, atol=1e-6)
