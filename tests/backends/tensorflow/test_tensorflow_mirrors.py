"""TensorFlow: mirrored variables keep a copy on each device, and none is ever old."""

from __future__ import annotations

import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import keras_strategies as ks
from keras_strategies import errors

ks.set_virtual_cpu_devices(4)

START = np.array([[1, 2], [3, 4], [5, 6]], "float32")
ONES = np.ones((3, 2), "float32")


def copies_of(variable):
    """The copies, by their device."""
    strategy = variable.__dict__["_keras_strategies_strategy"]
    found = {c.device: c.value for c in strategy.drivers.fit.copies(variable)}
    assert list(found) == [str(device) for device in strategy.placement.replicas]
    return found


def assert_everywhere(variable, expected) -> None:
    for device, copy in copies_of(variable).items():
        assert f"CPU:{device[-1]}" in copy.device
        where = f"{variable.name} on {device}"
        np.testing.assert_array_equal(copy.numpy(), expected, err_msg=where)


# With three replicas a variable has two copies, so that what reaches only one shows.
@pytest.fixture
def strategy():
    return ks.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"])


@pytest.fixture
def variable(strategy):
    with strategy.scope():
        return keras.Variable(START, name="kernel")


TWO_ROWS = tf.IndexedSlices(
    tf.constant([[7.0, 8.0], [2.0, 4.0], [7.0, 8.0]]), tf.constant([2, 0, 2])
)
ONE_ROW = tf.IndexedSlices(tf.constant([[8.0, 9.0]]), tf.constant([1]))

# Ways to assign a variable, of each kind of operation.
ASSIGNMENTS = {
    "assign": lambda v: v.assign(START * 2),
    "assign_sub_unread": lambda v: v.assign_sub(ONES, read_value=False),
    "chained_unread": lambda v: v.assign_add(ONES).assign_add(ONES, read_value=False),
    "chained_scatter": lambda v: v.assign_add(ONES).scatter_add(TWO_ROWS),
    "scatter_mul": lambda v: v.scatter_mul(TWO_ROWS),
    "scatter_update": lambda v: v.scatter_update(TWO_ROWS),
    "batch_scatter_update": lambda v: v.batch_scatter_update(ONE_ROW),
    "scatter_nd_max": lambda v: v.scatter_nd_max([[1]], [[0.0, 9.0]]),
    "slice": lambda v: v[1:, 0].assign([8.0, 9.0]),
    "tf1_assign_add": lambda v: tf.compat.v1.assign_add(v, ONES),
    "tf1_scatter_add": lambda v: tf.compat.v1.scatter_add(v, [1], [[1.0, 1.0]]),
}


def assert_assigned(variable, name):
    plain = tf.Variable(START)
    ASSIGNMENTS[name](plain)
    assert not np.array_equal(plain, START)
    assert_everywhere(variable, plain.numpy())


@pytest.mark.parametrize("name", ASSIGNMENTS)
def test_every_assignment_reaches_every_copy(variable, name):
    ASSIGNMENTS[name](variable.value)
    assert_assigned(variable, name)


def test_every_assignment_in_a_branch_and_a_loop_reaches_every_copy(strategy):
    with strategy.scope():
        variables = {name: keras.Variable(START, name=name) for name in ASSIGNMENTS}

    @tf.function
    def program(yes):
        if yes:
            for _ in tf.range(1):
                for name, variable in variables.items():
                    ASSIGNMENTS[name](variable.value)

    program(tf.constant(True))
    for name, variable in variables.items():
        assert_assigned(variable, name)


def test_a_variable_that_is_an_argument_of_a_program_stays_itself(variable):
    @tf.function
    def program(nested, again, number):
        nested["a"][0].assign_add(number * ONES)
        again.assign_sub(ONES)
        return nested["a"][0]

    raw = variable.value
    for number in (1.0, 2.0):
        result = program({"a": [raw]}, raw, tf.constant(number))
    np.testing.assert_array_equal(result, START + 1)
    assert_everywhere(variable, START + 1)
    assert program.experimental_get_tracing_count() == 1


def test_threads_that_assign_at_once_leave_equal_copies(variable):
    def assign(start):
        for i in range(50):
            variable.value.assign(START * (start + i))

    threads = [threading.Thread(target=assign, args=(100 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert_everywhere(variable, variable.numpy())


def test_a_wrong_shape_changes_no_copy(variable):
    with pytest.raises(ValueError, match=r"[Ss]hape"):
        variable.value.assign([1.0, 2.0])
    with pytest.raises(TypeError, match="IndexedSlices"):
        variable.value.scatter_add(ONES)
    variable.value.assign_add(ONES)
    assert_everywhere(variable, START + 1)


def test_an_xla_program_cannot_leave_copies_behind(variable):
    @tf.function(jit_compile=True)
    def program():
        variable.value.assign_add(ONES)

    with pytest.raises(errors.ContextError, match=r"mirrored on .*jit_compile=False"):
        program()
    assert_everywhere(variable, START)


def poison(variable, device: str) -> None:
    """Gives the copy on one device, and it alone, other values."""
    place, value = copies_of(variable)[device], tf.constant(100 * START[:2, :1])
    tf.raw_ops.AssignVariableOp(resource=place.handle, value=value)


def test_replicas_of_fit_read_their_own_copies(strategy):
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), layers.Dense(1)])
        model.compile("sgd", "mse")
    x = np.ones((12, 2), "float32")
    before = model.predict(x, batch_size=12, verbose=0)
    poison(model.layers[0].kernel, "cpu:1")
    after = model.predict(x, batch_size=12, verbose=0)
    of_replica = np.repeat([0, 1, 2], 4)
    np.testing.assert_array_equal(before[of_replica != 1], after[of_replica != 1])
    np.testing.assert_allclose(after[of_replica == 1], 400.0)


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_find_the_variable_behind_a_copy(strategy, variable, compiled):
    with strategy.scope():
        table = keras.Variable(START)

    def fn():
        with tf.GradientTape() as tape:
            kernel = variable.value
            loss = tf.reduce_sum(kernel * kernel)
            loss += tf.cond(loss > 0, lambda: tf.reduce_sum(3 * kernel), lambda: 0.0)
            _, total = tf.while_loop(
                lambda i, _: i < 4,
                lambda i, total: (i + 1, total + tf.reduce_sum(kernel)),
                [0, 0.0],
            )
            rows = tf.gather(table.value, [2, 0, 2])
            loss += total + tf.reduce_sum(rows)
        return tape.gradient(loss, [kernel, table.value])

    def run():
        return strategy.run(fn)

    dense, sparse = (ks.function(run) if compiled else run)()
    for own in strategy.experimental_local_results(dense):
        np.testing.assert_allclose(own, 2 * START + 7)
    for own in strategy.experimental_local_results(sparse):
        assert isinstance(own, tf.IndexedSlices)
        found = tf.convert_to_tensor(own)
        np.testing.assert_array_equal(found, [[1, 1], [0, 0], [2, 2]])


def test_files_and_checkpoints_restore_every_copy(strategy, tmp_path):
    with strategy.scope():
        norm = layers.BatchNormalization()
        model = keras.Sequential([keras.Input((2,)), layers.Dense(3), norm])
        model.compile("adam", "mse")
    model.fit(np.ones((8, 2)), np.ones((8, 3)), batch_size=4, verbose=0)
    expected = model.get_weights()
    model.save_weights(tmp_path / "all.weights.h5")
    model.save(tmp_path / "all.keras")
    checkpoint = tf.train.Checkpoint(model=model)
    path = checkpoint.save(tmp_path / "checkpoint")
    for restore in (
        lambda: model.load_weights(tmp_path / "all.weights.h5"),
        lambda: model.set_weights(expected),
        lambda: checkpoint.restore(path),
    ):
        model.set_weights([np.zeros_like(weight) for weight in expected])
        restore()
        assert_restored(model, expected)
    with strategy.scope():
        assert_restored(keras.models.load_model(tmp_path / "all.keras"), expected)


def assert_restored(model, expected):
    assert len(model.variables) == len(expected)
    for variable, value in zip(model.weights, expected, strict=True):
        assert_everywhere(variable, value)
