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
    """Normalizes batches twice: replicas exchange statistics, and their gradients."""

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


@pytest.mark.parametrize(
    ("then", "traces"),
    [
        (None, 1),
        pytest.param(scaled_gradient, 1, marks=pytest.mark.nightly),
        # Functions in operations are traced for each replica.
        (in_a_program, 2),
        pytest.param(in_a_loop, 2, marks=pytest.mark.nightly),
    ],
)
def test_a_copied_replica_computes_what_a_traced_one_does(then, traces):
    found = trained(two(), then)
    assert_same(found, trained(ks.OneDeviceStrategy("cpu:0"), then))
    assert min(found[2], 2) == traces


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


@pytest.mark.nightly(unless=["scaled_gradient-centered-2-1"])
@pytest.mark.parametrize(
    ("between", "then", "count", "traces"),
    [
        (scaled_gradient, centered, 2, 1),
        # The second replica is traced after what it has exchanged as a copy.
        (None, in_a_program, 2, 2),
        (scaled_gradient, in_a_program, 4, 4),
    ],
)
def test_copies_exchange_statistics(between, then, count, traces):
    strategy = ks.MirroredStrategy([f"cpu:{i}" for i in range(count)])
    found = normalized(strategy, between, then)
    one = normalized(ks.OneDeviceStrategy("cpu:0"), between, then, eager=True)
    for own, expected in zip(found[0], one[0], strict=True):
        np.testing.assert_allclose(own, expected, rtol=1e-5, atol=2e-6)
    assert found[1] == traces
