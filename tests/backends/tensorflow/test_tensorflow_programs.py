"""TensorFlow: the programs of steps, and their exactness beyond the common suite."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from backends.tensorflow import tensorflow_training
from backends.tensorflow.tensorflow_training import (
    SEEN,
    Rows,
    assert_close,
    assert_same,
    fit,
    four,
    rows,
    small_model,
    two,
    under,
)
from keras import layers, ops

import keras_strategies as ks


def test_fit_is_exact_with_variables_apart_from_the_only_replica():
    central = ks.CentralStorageStrategy(["cpu:1"], "cpu:0")
    assert_same(central, small_model, fit(16))


# 25: the last batch has fewer rows than there are replicas; 22: more, split unevenly.
@pytest.mark.parametrize("count", [22, pytest.param(25, marks=pytest.mark.nightly)])
def test_at_most_two_programs_for_batches_of_any_size(count):
    keras.utils.set_random_seed(7)
    with four().scope():
        model = keras.Sequential([keras.Input((6,)), Rows(), layers.Dense(1)])
        model.compile("sgd", "mse")
    SEEN.clear()
    x, y, _ = rows(count)
    model.fit(x, y, batch_size=8, epochs=3, verbose=0)
    # A program has one call per replica, or one for all.
    programs = sum(replica in (0, None) for _, replica in SEEN)
    assert 1 <= programs <= 2
    model.fit(x, y, batch_size=8, epochs=2, verbose=0)
    assert sum(replica in (0, None) for _, replica in SEEN) == programs


def test_the_first_step_is_traced_once():
    """Slots and metrics that a trace creates would make TensorFlow trace it twice."""
    traces = []

    class Counts(keras.optimizers.SGD):
        def apply(self, *args, **kwargs):
            traces.append(self.built)
            return super().apply(*args, **kwargs)

    with two().scope():
        model = keras.Sequential([keras.Input((6,)), layers.Dense(1)])
        model.compile(Counts(0.1, momentum=0.9), "mse", metrics=["mae"])
    x, y, _ = rows(8)
    model.fit(x, y, batch_size=4, epochs=2, verbose=0)
    assert traces == [True]


class AnyRank(keras.Model):
    """A prediction for each row, of inputs with any number of axes."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(6)

    def build(self, shape):
        self.dense.build(shape)

    def call(self, x):
        hidden = ops.tanh(self.dense(x))
        return ops.mean(hidden, axis=tuple(range(1, len(x.shape))))[:, None]


def of_rank(rank, count=11):
    random = np.random.default_rng(rank)
    x = random.normal(size=(count, *range(2, rank), 6)).astype("float32")
    return x, x.sum(axis=tuple(range(1, rank)))[:, None]


def compiled(model, **options):
    model.compile(keras.optimizers.SGD(0.05), "mse", metrics=["mae"], **options)
    return model


# The last batches have fewer rows, and fewer than there are replicas.
@pytest.mark.slow(seconds=13)
def test_inputs_of_other_ranks_are_exact():
    def train(model):
        found = []
        for rank in (2, 3, 2):
            x, y = of_rank(rank)
            fitted = {"epochs": 2, "batch_size": 4, "shuffle": False, "verbose": 0}
            found += [
                model.fit(x, y, **fitted).history,
                model.evaluate(x, y, batch_size=5, verbose=0),
                model.predict(x, batch_size=4, verbose=0),
                model.predict(x[:2], verbose=0),
            ]
        return found

    assert_same(four(), lambda: compiled(AnyRank()), train)


def test_a_dataset_of_batches_of_several_ranks_is_exact():
    batches = [of_rank(*given) for given in ((2, 4), (3, 4), (4, 3), (3, 1))]

    def train(model):
        dataset = tf.data.Dataset.from_generator(
            lambda: iter(batches), output_signature=(tf.TensorSpec(None),) * 2
        )
        return [
            model.fit(dataset, epochs=2, verbose=0).history,
            model.evaluate(dataset, verbose=0),
            model.predict(dataset, verbose=0),
        ]

    def make():
        return compiled(AnyRank(), steps_per_execution=2)

    assert_same(two(), make, train)


def test_jit_compile_is_said_not_to_apply_and_changes_nothing():
    expected = under(None, small_model, fit(16))
    with pytest.warns(UserWarning, match="runs without XLA") as warned:
        found = under(two(), lambda: small_model(jit_compile=True), fit(16))
    (said,) = [w for w in warned if "runs without XLA" in str(w.message)]
    assert said.filename == tensorflow_training.__file__
    assert "but for random numbers" in str(said.message)
    assert_close(expected, found)


@pytest.mark.parametrize("is_inner", [False, True])
def test_a_strategy_of_tf_distribute_at_the_same_time(is_inner: bool):
    strategy, other = two(), tf.distribute.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), layers.Dense(1)])
        model.compile("sgd", "mse")
    x = rows(10, 4)[0]

    def mixed():
        if is_inner:
            with strategy.scope(), other.scope():
                model.fit(x, x[:, :1], verbose=0)
        with other.scope(), strategy.scope():
            pass

    with pytest.raises(ks.errors.MixedStrategyError, match=r"`tf\.distribute`.*Leave"):
        mixed()
    assert not tf.distribute.has_strategy() and not ks.has_strategy()
    model.fit(x, x[:, :1], verbose=0)
