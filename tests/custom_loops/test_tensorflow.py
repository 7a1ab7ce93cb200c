"""Custom loops in TensorFlow's own words: tapes, `tf.function`, sparse gradients."""

from __future__ import annotations

import contextvars
import functools
import warnings

import keras
import numpy as np
import pytest
from custom_loops.helpers import assert_alike, numbers
from keras import layers

import keras_strategies as ks

if keras.backend.backend() != "tensorflow":
    pytest.skip("TensorFlow only", allow_module_level=True)

import tensorflow as tf

#: Each replica counts by itself.
COUNTED = {"synchronization": "on_read", "aggregation": "sum"}


def parts(*arrays):
    return ks.PerReplica([tf.constant(array) for array in arrays])


def uneven(rows=5, columns=6):
    x = np.random.default_rng(0).normal(size=(rows, columns)).astype("float32")
    return tf.constant(x), parts(x[:3], x[3:])


def train_with_tape(strategy, x, compiled, make):
    with strategy.scope():
        keras.utils.set_random_seed(1)
        model = make()
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9, clipnorm=0.5)

    def replica_step(x):
        with tf.GradientTape() as tape:
            loss = ks.compute_average_loss(model(x, training=True)[:, 0] ** 2)
            if model.losses:
                loss += ks.scale_regularization_loss(tf.add_n(model.losses))
        gradients = tape.gradient(loss, model.trainable_variables)
        pairs = zip(gradients, model.trainable_variables, strict=True)
        optimizer.apply_gradients(pairs)
        return loss

    def step(x):
        losses = strategy.run(replica_step, args=(x,))
        return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)

    step = tf.function(step) if compiled else step
    return [np.array([float(step(x)) for _ in range(3)]), *model.get_weights()]


def unbuilt():
    hidden = layers.Dense(4, activation="tanh")
    return keras.Sequential([hidden, layers.BatchNormalization(), layers.Dense(1)])


def regularized():
    hidden = layers.Dense(4, kernel_regularizer="l2", bias_regularizer="l1")
    both = keras.regularizers.L1L2(0.1, 0.1)
    return keras.Sequential([hidden, layers.Dense(1, kernel_regularizer=both)])


@functools.cache
def alone(make):
    whole, _ = uneven()
    return train_with_tape(ks.get_strategy(), whole, False, make)


@pytest.mark.nightly(unless=["False-unbuilt"])
@pytest.mark.parametrize("make", [unbuilt, regularized])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_tape_in_the_replica_function_equals_one_device(mirrored, compiled, make):
    _, spread = uneven()
    found = train_with_tape(mirrored, spread, compiled, make)
    assert_alike(found, alone(make), 1e-5)


def test_a_variable_of_tensorflow_in_a_scope_says_that_it_is_one_for_all(mirrored):
    with mirrored.scope(), pytest.warns(UserWarning, match="Use `keras.Variable"):
        tf.Variable(0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        tf.Variable(0.0)
        with mirrored.scope():
            model = unbuilt()
            model.compile("adam", "mse", metrics=["mae"])
        model.fit(np.zeros((8, 6)), np.zeros(8), batch_size=4, verbose=0)
        with ks.OneDeviceStrategy("cpu:0").scope():
            tf.Variable(0.0)


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_of_an_embedding_stay_sparse(mirrored, compiled):
    kinds = []

    def train(strategy, ids):
        with strategy.scope():
            keras.utils.set_random_seed(1)
            table = layers.Embedding(6, 2)
            table.build()
            optimizer = keras.optimizers.SGD(0.5)

        def replica_step(ids):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(table(ids) ** 2)
            gradients = tape.gradient(loss, table.trainable_variables)
            kinds.append(type(gradients[0]))
            optimizer.apply(gradients, table.trainable_variables)

        def step(ids):
            strategy.run(replica_step, args=(ids,))

        (tf.function(step) if compiled else step)(ids)
        return table.get_weights()

    # Row 1 is looked up on both replicas.
    found = train(mirrored, parts([0, 1], [1, 4]))
    expected = train(ks.get_strategy(), tf.constant([0, 1, 1, 4]))
    assert set(kinds) == {tf.IndexedSlices}
    assert_alike(found, expected, 1e-5)


def test_python_branches_on_tensors_are_converted(mirrored):
    def replica(x):
        if tf.reduce_sum(x) > 2:
            return x * 10
        return x

    found = tf.function(lambda x: mirrored.run(replica, args=(x,)))(parts(1.0, 3.0))
    assert numbers(found) == [1, 30]


def test_replicas_have_the_context_variables_of_the_caller(mirrored) -> None:
    user = contextvars.ContextVar("user", default=0)
    user.set(3)
    found = []
    mirrored.run(lambda: found.append(user.get()))
    assert found == [3, 3]


def test_xla_is_refused_once_for_several_replicas(mirrored):
    def add(x):
        return mirrored.run(tf.identity, args=(x,))

    step = ks.function(add, jit_compile=True)
    with pytest.warns(UserWarning, match="without XLA"):
        step(parts(1.0, 2.0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = step(parts(3.0, 4.0))
    assert numbers(found) == [3, 4]


def test_xla_compiles_for_one_replica():
    strategy = ks.OneDeviceStrategy("cpu:0")

    def add(x):
        return strategy.run(lambda y: y + 1, args=(x,))

    assert float(ks.function(add, jit_compile=True)(tf.constant(1.0))) == 2


def test_an_assignment_in_a_program_gives_replicas_their_parts(mirrored):
    with mirrored.scope():
        total = keras.Variable(0.0, trainable=False, **COUNTED)

    @tf.function
    def step(x):
        mirrored.run(lambda x: total.assign_add(x), args=(x,))
        before = total + 0
        total.assign(100.0)
        mirrored.run(lambda x: total.assign_add(x), args=(x,))
        return before, total + 0

    x = parts(1.0, 2.0)
    assert [float(value) for value in step(x)] == [3, 103]
    assert [float(value) for value in step(x)] == [106, 103]


@pytest.mark.parametrize("devices", [["cpu:0"], ["cpu:0", "cpu:1"]])
@pytest.mark.parametrize("jit", [None, True], ids=["", "xla"])
def test_a_tf_function_in_run_may_do_what_a_replica_does(devices, jit):
    """Eager `run` of a `tf.function`, on one replica as on several; there too."""
    strategy = ks.MirroredStrategy(devices)
    count = len(devices)
    with strategy.scope():
        metric = keras.metrics.Mean()
        mean = keras.Variable(1.0, aggregation="mean")
        seen = keras.Variable(0.0, trainable=False, **COUNTED)
        optimizer = keras.optimizers.SGD(0.5)
        optimizer.build([mean])

    @tf.function(jit_compile=jit)
    def step(x):
        context = ks.get_replica_context()
        metric.update_state(x)
        mean.assign_add(tf.reduce_sum(x))
        seen.assign_add(1.0)
        optimizer.apply([tf.ones(()) / count], [mean])
        merged = context.merge_call(lambda _, y: y, (x,))
        return context.all_reduce("SUM", x), context.all_gather(merged, 0), mean + 0.0

    x = tf.constant([1.0, 2.0])
    for i in (1, 2):
        total, gathered, value = strategy.run(step, (x,))
        local = [
            strategy.experimental_local_results(each)[0].numpy().tolist()
            for each in (total, gathered, value)
        ]
        assert local[0] == [count * 1.0, count * 2.0]
        assert local[1] == [1.0, 2.0] * count
        assert local[2] == float(mean) == 1.0 + i * 2.5
        assert float(seen) == count * i
        assert float(metric.result()) == 1.5
    assert step.experimental_get_tracing_count() == 0


@pytest.mark.parametrize("signature", [None, [tf.TensorSpec((None, 4))]])
def test_draws_of_rows_in_a_function_within_run_are_refused(mirrored, signature):
    """A trace is called by all replicas; draws without rows are right in it."""
    normal = keras.random.normal

    @tf.function(input_signature=signature)
    def noisy(x):
        return x + normal(tf.shape(x), seed=1)

    @tf.function(input_signature=signature)
    def shifted(x):
        return x + normal((1, 4), seed=1) + normal((), seed=2)

    rows = parts(np.zeros((3, 4), "float32"), np.zeros((3, 4), "float32"))
    with pytest.raises(ks.errors.ContextError, match="Omit the inner"):
        mirrored.run(lambda x: noisy(x), args=(rows,))
    first, second = mirrored.run(lambda x: shifted(x), args=(rows,)).values
    np.testing.assert_array_equal(first, second)
