"""Custom loops in TensorFlow's own words: tapes, `tf.function`, sparse gradients."""

from __future__ import annotations

import contextvars
import functools
import runpy
import warnings
from pathlib import Path

import keras
import numpy as np
import pytest
from harness.strategies import STRATEGIES
from keras import layers, ops

import keras_strategies as ks

if keras.backend.backend() != "tensorflow":
    pytest.skip("TensorFlow only", allow_module_level=True)

import tensorflow as tf

MIGRATION = Path(__file__).parents[2] / "examples" / "migrate_from_tf_distribute"


def parts(*arrays):
    return ks.PerReplica([tf.constant(array) for array in arrays])


def uneven(rows=5, columns=6):
    x = np.random.default_rng(0).normal(size=(rows, columns)).astype("float32")
    return tf.constant(x), parts(x[:3], x[3:])


def assert_alike(found, expected):
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


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


def built():
    return keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(4),
            layers.BatchNormalization(),
            layers.Dense(1),
        ]
    )


def unbuilt():
    return keras.Sequential([layers.Dense(4, activation="tanh"), layers.Dense(1)])


def regularized():
    return keras.Sequential(
        [
            layers.Dense(4, kernel_regularizer="l2", bias_regularizer="l1"),
            layers.Dense(1, kernel_regularizer=keras.regularizers.L1L2(0.1, 0.1)),
        ]
    )


@functools.cache
def alone(make):
    whole, _ = uneven()
    return train_with_tape(ks.get_strategy(), whole, False, make)


@pytest.mark.nightly(unless=["False-unbuilt"])
@pytest.mark.parametrize("make", [built, unbuilt, regularized])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_tape_in_the_replica_function_equals_one_device(mirrored, compiled, make):
    _, spread = uneven()
    assert_alike(train_with_tape(mirrored, spread, compiled, make), alone(make))


@pytest.mark.parametrize(
    "name",
    [
        "one_device",  # Read as Keras has them; two replicas are tested above.
        "central",  # Read from the only copy.
        pytest.param("mirrored_4", marks=pytest.mark.nightly),
    ],
)
def test_regularization_losses_are_read_under_every_strategy(name):
    strategy = STRATEGIES[name].make()
    data = tf.data.Dataset.from_tensors(uneven()[0])
    rows = next(iter(strategy.experimental_distribute_dataset(data)))
    found = train_with_tape(strategy, rows, False, regularized)
    assert_alike(found, alone(regularized))


def test_a_variable_of_tensorflow_in_a_scope_says_that_it_is_one_for_all(mirrored):
    with mirrored.scope(), pytest.warns(UserWarning, match="Use `keras.Variable"):
        tf.Variable(0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        tf.Variable(0.0)
        with mirrored.scope():
            model = built()
            model.compile("adam", "mse", metrics=["mae"])
        model.fit(np.zeros((8, 6)), np.zeros(8), batch_size=4, verbose=0)
        with ks.OneDeviceStrategy("cpu:0").scope():
            tf.Variable(0.0)


def test_variables_made_in_a_run_are_mirrored_as_all_are(mirrored):
    _, spread = uneven()
    with mirrored.scope():
        model = unbuilt()
    mirrored.run(lambda x: model(x), args=(spread,))
    assert len(model.variables) == 4
    for variable in model.variables:
        assert isinstance(variable.value, tf.Variable)
        first, second = mirrored.drivers.fit.copies(variable)
        assert (first.device, second.device) == ("cpu:0", "cpu:1")
        np.testing.assert_array_equal(first.value, second.value)


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
    assert_alike(found, expected)


def test_a_replica_function_may_be_a_tf_function(mirrored):
    @tf.function
    def double(x):
        total = ks.get_replica_context().all_reduce("SUM", tf.reduce_sum(x))
        return 2 * x + total

    found = mirrored.run(double, args=(parts([1.0], [2.0]),))
    assert [float(part[0]) for part in found.values] == [5, 7]


def test_a_program_is_traced_once_for_batches_alike(mirrored):
    traces = []

    @ks.function
    def step(x):
        traces.append(x)
        return mirrored.run(lambda x: x + 1, args=(x,))

    for value in (1.0, 2.0, 3.0):
        found = step(parts([value], [value]))
        assert [float(part[0]) for part in found.values] == [value + 1] * 2
    assert len(traces) == 1


def test_python_branches_on_tensors_are_converted(mirrored):
    def replica(x):
        if tf.reduce_sum(x) > 2:
            return x * 10
        return x

    found = tf.function(lambda x: mirrored.run(replica, args=(x,)))(parts(1.0, 3.0))
    assert [float(part) for part in found.values] == [1, 30]


def test_xla_is_refused_once_for_several_replicas(mirrored):
    def add(x):
        return mirrored.run(tf.identity, args=(x,))

    step = ks.function(add, jit_compile=True)
    with pytest.warns(UserWarning, match="without XLA"):
        step(parts(1.0, 2.0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = step(parts(3.0, 4.0))
    assert [float(part) for part in found.values] == [3, 4]


def test_xla_compiles_for_one_replica():
    strategy = ks.OneDeviceStrategy("cpu:0")

    def add(x):
        return strategy.run(lambda y: y + 1, args=(x,))

    assert float(ks.function(add, jit_compile=True)(tf.constant(1.0))) == 2


def test_an_assignment_in_a_program_gives_replicas_their_parts(mirrored):
    with mirrored.scope():
        total = keras.Variable(
            0.0, trainable=False, synchronization="on_read", aggregation="sum"
        )

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


def test_a_loss_of_keras_is_not_divided_by_the_engines_replicas(mirrored):
    loss = keras.losses.MeanSquaredError()

    def replica(x):
        return loss(ops.zeros_like(x), x)

    found = mirrored.run(replica, args=(parts([2.0], [4.0]),))
    assert [float(part) for part in found.values] == [4, 16]


def test_replicas_that_disagree_on_collectives_are_a_mismatch(mirrored):
    def replica():
        if ks.get_replica_context().replica_id_in_sync_group == 0:
            ks.get_replica_context().all_reduce("SUM", tf.ones(()))

    with pytest.raises(ks.errors.ReplicaMismatchError, match="same collective calls"):
        mirrored.run(replica)
    found = mirrored.run(tf.identity, args=(parts(1.0, 2.0),))
    assert [float(part) for part in found.values] == [1, 2]


def test_the_migrated_script_trains_on_two_replicas(monkeypatch, capsys):
    two = ks.MirroredStrategy(["cpu:0", "cpu:1"])
    monkeypatch.setattr(ks, "MirroredStrategy", lambda: two)
    runpy.run_path(str(MIGRATION / "after.py"), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert float(lines[-1].split()[-1]) > 0.8


def test_the_script_before_migration_is_valid_python():
    source = (MIGRATION / "before.py").read_text()
    compile(source, "before.py", "exec")


def test_a_loop_over_a_dataset_that_is_not_converted_is_told_so(mirrored):
    dataset = mirrored.experimental_distribute_dataset([np.zeros(4, "float32")])

    @tf.function(autograph=False)
    def epoch():
        for _ in dataset:
            pass

    with pytest.raises(RuntimeError, match="iterated by Python while TensorFlow"):
        epoch()


@pytest.mark.nightly(unless=["mirrored"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: ks.OneDeviceStrategy("cpu:0"),
        lambda: ks.MirroredStrategy(["cpu:0"]),
        lambda: ks.experimental.CentralStorageStrategy(["cpu:0"]),
    ],
    ids=["one_device", "mirrored", "central"],
)
def test_one_replica_calls_collectives_in_loops_and_branches(make):
    """As without a strategy; several replicas cannot, and are told so."""

    def fn(x):
        replica = ks.get_replica_context()

        def body(i, x):
            x = replica.all_reduce("SUM", x * x)
            x = x / replica.all_reduce("MAX", tf.stop_gradient(tf.reduce_max(x)))
            return i + 1, x + tf.reduce_mean(replica.all_gather(x, 0))

        def loss_fn():
            _, found = tf.while_loop(lambda i, _: i < 3, body, (0, x * weights))
            return tf.cond(
                found[0] > 0,
                lambda: replica.all_reduce("MEAN", tf.reduce_sum(found)),
                lambda: 0.0,
            )

        return ks.value_and_grad(loss_fn, [weights])()

    def numbers(run):
        loss, (gradient,) = run(fn, tf.constant([1.0, 3.0]))
        return [float(loss), *gradient.numpy()]

    weights = keras.Variable([1.0, 2.0])
    expected = numbers(lambda fn, x: fn(x))
    strategy = make()
    with strategy.scope():
        weights = keras.Variable([1.0, 2.0])
    for run in (
        lambda fn, x: strategy.run(fn, args=(x,)),
        lambda fn, x: strategy.run(tf.function(fn), args=(x,)),
        lambda fn, x: ks.function(lambda x: strategy.run(fn, args=(x,)))(x),
    ):
        np.testing.assert_allclose(numbers(run), expected, rtol=1e-6)


@pytest.mark.parametrize("devices", [["cpu:0"], ["cpu:0", "cpu:1"]])
@pytest.mark.parametrize("jit", [None, True], ids=["", "xla"])
def test_a_tf_function_in_run_may_do_what_a_replica_does(devices, jit):
    """Eager `run` of a `tf.function`, on one replica as on several; there too."""
    strategy = ks.MirroredStrategy(devices)
    count = len(devices)
    with strategy.scope():
        metric = keras.metrics.Mean()
        mean = keras.Variable(1.0, aggregation="mean")
        seen = keras.Variable(
            0.0, synchronization="on_read", aggregation="sum", trainable=False
        )
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


@pytest.mark.parametrize("devices", [["cpu:0"], ["cpu:0", "cpu:1"]])
@pytest.mark.parametrize("in_function", [False, True], ids=["eager", "function"])
def test_merge_call_in_an_init_scope(devices, in_function):
    """There: the argument on each replica, and the updates of a trace."""
    strategy = ks.MirroredStrategy(devices)
    with strategy.scope():
        v = keras.Variable(1.0)
    calls = []

    def merged(strategy, x):
        calls.append(tf.executing_eagerly())
        strategy.extended.update(v, lambda v: v.assign_add(1.0))
        return x

    def step(x):
        with tf.init_scope():
            found = ks.get_replica_context().merge_call(merged, (tf.constant(2.0),))
        return found + x

    call = tf.function(lambda x: strategy.run(step, (x,))) if in_function else None
    for i in (1, 2):
        found = (call or (lambda x: strategy.run(step, (x,))))(tf.constant(3.0))
        parts = strategy.experimental_local_results(found)
        assert [float(part) for part in parts] == [5.0] * len(devices)
        assert len(calls) == (1 if in_function else i)
    assert all(calls)
    assert float(v) == 1.0 + len(calls)


def test_replicas_have_the_context_variables_of_the_caller(mirrored) -> None:
    user = contextvars.ContextVar("user", default=0)
    user.set(3)
    found = []
    mirrored.run(lambda: found.append(user.get()))
    assert found == [3, 3]
