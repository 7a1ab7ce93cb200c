"""TensorFlow: layers draw for the rows of a replica what one device draws."""

from __future__ import annotations

import contextlib
import warnings

import keras
import numpy as np
import pytest
from keras import layers, ops

import keras_strategies as ks

if keras.backend.backend() != "tensorflow":
    pytest.skip("tests of the TensorFlow backend", allow_module_level=True)

import tensorflow as tf
from backends.tensorflow.tensorflow_training import assert_close

from keras_strategies.engines.tensorflow.data_parallel.graph_copies import ReplicaTraces

ks.set_virtual_cpu_devices(4)
X = np.random.default_rng(5).normal(size=(13, 7)).astype("float32")
random = keras.random


def three():
    return ks.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"])


class Noise(layers.Layer):
    """Adds what a function of a tensor and a seed draws."""

    def __init__(self, draw, seed=None):
        super().__init__()
        self.draw = draw
        self.seed = random.SeedGenerator(3) if seed is None else seed

    def call(self, x):
        return x + self.draw(x, self.seed)


def uniform(x, seed):
    return random.uniform(ops.shape(x), seed=seed)


def in_a_branch(x, seed):
    first = random.uniform(ops.shape(x), seed=seed)
    state = ops.cast(ops.convert_to_tensor(seed.state)[1], "float32")
    return first + ops.cond(
        state > 1.5,
        lambda: random.normal(ops.shape(x), seed=7),
        lambda: random.uniform((1, 7), seed=8) + random.uniform(ops.shape(x), seed=9),
    )


def behind_others(x, seed):
    """Rows, none, unused ones, and three for each row; half of a batch is 4 rows."""
    unused = random.normal(ops.shape(x), seed=seed)
    shared = random.normal((4, 7), seed=seed)
    many = random.uniform((ops.shape(x)[0] * 3, 7), seed=seed)
    many = ops.sum(ops.reshape(many, (-1, 3, 7)), 1)
    del unused
    return many + ops.sum(shared, 0) + random.uniform(ops.shape(x), seed=seed)


NOISES = {
    "uniform": uniform,
    "dropout": lambda x, seed: random.dropout(x, 0.5, seed=seed),
    "gamma": lambda x, seed: random.gamma(ops.shape(x), 0.3, seed=seed),
    "categorical": lambda x, seed: ops.cast(
        random.categorical(x, 7, seed=seed), "float32"
    ),
    "branch": in_a_branch,
    "others": behind_others,
}


def predicted(strategy, make, x, way):
    """The outputs of two predictions by a model with a layer that draws."""
    keras.utils.set_random_seed(11)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = keras.Sequential([keras.Input(x.shape[1:]), make()])
        model.compile("sgd", "mse", run_eagerly=way == "eager")
    if way == "any rows":
        found = [model.predict(x, batch_size=8, verbose=0) for _ in range(2)]
    else:
        found = [model.predict_on_batch(x) for _ in range(2)]
    return [np.asarray(each) for each in found]


def assert_equal_bits(expected, found):
    for a, b in zip(expected, found, strict=True):
        np.testing.assert_array_equal(a, b)


@contextlib.contextmanager
def problems():
    """The reasons why layers are not split."""
    found = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield found
    texts = [str(each.message) for each in caught]
    found += [text for text in texts if "cannot be split by rows" in text]


@pytest.fixture
def traces(monkeypatch):
    """The replicas that were traced, and not copied."""
    found = []
    tracing = ReplicaTraces.tracing

    def recorded(traces, replica_id, was_used_by):
        found.append(replica_id)
        return tracing(traces, replica_id, was_used_by)

    monkeypatch.setattr(ReplicaTraces, "tracing", recorded)
    return found


#: Draws in bodies of loops and branches are those of an unsplit call.
UNSPLIT = ("branch",)
SUMS = (*UNSPLIT, "others")


@pytest.mark.nightly(unless=["eager-uniform", "eager-dropout"])
@pytest.mark.parametrize("name", NOISES)
@pytest.mark.parametrize("way", ["12 rows", "13 rows", "any rows", "eager"])
def test_numbers_are_bit_for_bit_those_of_keras(name, way, traces):
    x = X[:12] if way == "12 rows" else X
    expected = predicted(None, lambda: Noise(NOISES[name]), x, way)
    with problems() as found_problems:
        found = predicted(three(), lambda: Noise(NOISES[name]), x, way)
    if name in SUMS:
        # Programs add several numbers in another order.
        assert_close(expected, found, 1e-6)
    else:
        assert_equal_bits(expected, found)
    assert not np.array_equal(*found)
    assert bool(found_problems) == (name in UNSPLIT)
    if way == "12 rows":
        # Others are copies.
        assert set(traces) == (set() if name in UNSPLIT else {0})


def trained(strategy, make, **options):
    keras.utils.set_random_seed(11)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = keras.Sequential(
            [keras.Input((7,)), layers.Dense(8), make(), layers.Dense(1)]
        )
        model.compile(keras.optimizers.SGD(0.05), "mse", **options)
    history = model.fit(X, X[:, :1], batch_size=6, epochs=3, shuffle=False, verbose=0)
    return history.history["loss"], model.get_weights()


class Rematerialized(layers.Layer):
    """Draws again in the backward pass, as `keras.remat` does."""

    def __init__(self):
        super().__init__()
        self.seed = random.SeedGenerator(3)
        self.inner = layers.Dense(8)

    def build(self, shape):
        self.inner.build(shape)

    def call(self, x):
        def computed(x):
            return random.dropout(ops.tanh(self.inner(x)), 0.5, seed=self.seed)

        return keras.remat(computed)(x)


def test_rematerialized_numbers():
    expected = trained(None, Rematerialized)
    with problems() as reasons:
        found = trained(three(), Rematerialized)
    assert_close(expected, found)
    assert len(reasons) == 1
    assert "is computed again in" in reasons[0]


@pytest.mark.parametrize("signature", [None, [tf.TensorSpec((None, 4))]])
def test_rows_in_a_function_within_run_are_refused(signature) -> None:
    """A trace is called by all replicas; draws without rows are right in it."""
    strategy = ks.MirroredStrategy(["cpu:0", "cpu:1"])

    @tf.function(input_signature=signature)
    def noisy(x):
        return x + random.normal(ops.shape(x), seed=1)

    @tf.function(input_signature=signature)
    def shifted(x):
        return x + random.normal((1, 4), seed=1) + random.normal((), seed=2)

    rows = ks.PerReplica([tf.zeros((3, 4)), tf.zeros((3, 4))])
    with pytest.raises(ks.errors.ContextError, match="Omit the inner"):
        strategy.run(lambda x: noisy(x), args=(rows,))
    found = strategy.run(lambda x: shifted(x), args=(rows,))
    first, second = strategy.experimental_local_results(found)
    np.testing.assert_array_equal(first, second)
