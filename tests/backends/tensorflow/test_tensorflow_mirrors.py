"""TensorFlow: mirrored variables keep a copy on each device, and none is ever old."""

from __future__ import annotations

import copy
import gc
import threading
import weakref

import keras
import numpy as np
import pytest
from keras import layers

import keras_strategies as ks
from keras_strategies import errors

if keras.backend.backend() != "tensorflow":
    pytest.skip("tests of the TensorFlow backend", allow_module_level=True)

import tensorflow as tf
from backends.tensorflow.tensorflow_mirrors import (
    ONES,
    START,
    assert_everywhere,
    copies_of,
    rows,
)

ks.set_virtual_cpu_devices(4)

TWO_ROWS = rows([2, 0, 2], [[7, 8], [2, 4], [7, 8]])

# Every public way to assign a variable, and what it makes of START.
ASSIGNMENTS = {
    "keras_assign": (lambda v: v.assign(START * 2), START * 2),
    "keras_assign_add": (lambda v: v.assign_add(ONES), START + 1),
    "keras_assign_sub": (lambda v: v.assign_sub(ONES), START - 1),
    "assign": (lambda v: v.value.assign(START * 2), START * 2),
    "assign_add": (lambda v: v.value.assign_add(ONES), START + 1),
    "assign_sub": (lambda v: v.value.assign_sub(ONES), START - 1),
    "assign_unread": (
        lambda v: v.value.assign(START * 2, read_value=False),
        START * 2,
    ),
    "assign_add_unread": (
        lambda v: v.value.assign_add(ONES, read_value=False),
        START + 1,
    ),
    "assign_sub_unread": (
        lambda v: v.value.assign_sub(ONES, read_value=False),
        START - 1,
    ),
    "chained": (
        lambda v: v.value.assign_add(ONES).assign_sub(3 * ONES).assign_add(5 * ONES),
        START + 3,
    ),
    "chained_unread": (
        lambda v: v.value.assign_add(ONES).assign_add(ONES, read_value=False),
        START + 2,
    ),
    "chained_scatter": (
        lambda v: v.value.assign_add(ONES).scatter_add(rows([1], [[1, 1]])),
        [[2, 3], [5, 6], [6, 7]],
    ),
    "scatter_add": (
        lambda v: v.value.scatter_add(TWO_ROWS),
        [[3, 6], [3, 4], [19, 22]],
    ),
    "scatter_sub": (
        lambda v: v.value.scatter_sub(TWO_ROWS),
        [[-1, -2], [3, 4], [-9, -10]],
    ),
    "scatter_mul": (
        lambda v: v.value.scatter_mul(TWO_ROWS),
        [[2, 8], [3, 4], [245, 384]],
    ),
    "scatter_div": (
        lambda v: v.value.scatter_div(rows([0, 2], [[1, 2], [2, 4]])),
        [[1, 1], [3, 4], [2.5, 1.5]],
    ),
    "scatter_min": (
        lambda v: v.value.scatter_min(rows([1, 2], [[0, 9], [9, 0]])),
        [[1, 2], [0, 4], [5, 0]],
    ),
    "scatter_max": (
        lambda v: v.value.scatter_max(rows([1, 2], [[0, 9], [9, 0]])),
        [[1, 2], [3, 9], [9, 6]],
    ),
    "scatter_update": (
        lambda v: v.value.scatter_update(TWO_ROWS),
        [[2, 4], [3, 4], [7, 8]],
    ),
    "batch_scatter_update": (
        lambda v: v.value.batch_scatter_update(rows([1], [[8, 9]])),
        [[1, 2], [8, 9], [5, 6]],
    ),
    "scatter_nd_add": (
        lambda v: v.value.scatter_nd_add([[1, 0]], [2.0]),
        [[1, 2], [5, 4], [5, 6]],
    ),
    "scatter_nd_sub": (
        lambda v: v.value.scatter_nd_sub([[1, 0]], [2.0]),
        [[1, 2], [1, 4], [5, 6]],
    ),
    "scatter_nd_update": (
        lambda v: v.value.scatter_nd_update([[1]], [[8.0, 9.0]]),
        [[1, 2], [8, 9], [5, 6]],
    ),
    "scatter_nd_min": (
        lambda v: v.value.scatter_nd_min([[1]], [[0.0, 9.0]]),
        [[1, 2], [0, 4], [5, 6]],
    ),
    "scatter_nd_max": (
        lambda v: v.value.scatter_nd_max([[1]], [[0.0, 9.0]]),
        [[1, 2], [3, 9], [5, 6]],
    ),
    "slice": (
        lambda v: v.value[1:, 0].assign([8.0, 9.0]),
        [[1, 2], [8, 4], [9, 6]],
    ),
    "tf1_assign": (lambda v: tf.compat.v1.assign(v.value, START * 2), START * 2),
    "tf1_assign_add": (lambda v: tf.compat.v1.assign_add(v.value, ONES), START + 1),
    "tf1_scatter_add": (
        lambda v: tf.compat.v1.scatter_add(v.value, [1], [[1.0, 1.0]]),
        [[1, 2], [4, 5], [5, 6]],
    ),
    "tf1_scatter_nd_update": (
        lambda v: tf.compat.v1.scatter_nd_update(v.value, [[1]], [[8.0, 9.0]]),
        [[1, 2], [8, 9], [5, 6]],
    ),
}


@pytest.mark.parametrize("name", ASSIGNMENTS)
def test_every_assignment_reaches_every_copy(variable, name):
    assign, expected = ASSIGNMENTS[name]
    assign(variable)
    assert_everywhere(variable, expected)


def in_a_program(assign_all):
    tf.function(assign_all)()


def in_a_branch_and_a_loop(assign_all):
    @tf.function
    def program(yes):
        if yes:
            for _ in tf.range(1):
                assign_all()

    program(tf.constant(True))


@pytest.mark.nightly(unless=["3-in_a_branch_and_a_loop"])
@pytest.mark.parametrize("place", [in_a_program, in_a_branch_and_a_loop])
def test_every_assignment_of_a_program_reaches_every_copy(strategy, place):
    with strategy.scope():
        variables = {name: keras.Variable(START, name=name) for name in ASSIGNMENTS}

    def assign_all():
        for name, variable in variables.items():
            ASSIGNMENTS[name][0](variable)

    place(assign_all)
    for name, variable in variables.items():
        assert_everywhere(variable, ASSIGNMENTS[name][1])


def test_variables_are_born_with_their_copies(strategy):
    with strategy.scope():
        kernel = keras.Variable("random_normal", (3, 2), name="kernel")
    assert_everywhere(kernel, kernel.numpy())
    assert np.abs(kernel.numpy()).min() > 0


def test_a_program_that_is_older_than_the_first_step_assigns_the_copies(strategy):
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), layers.Dense(1)])
        model.compile("sgd", "mse")
    kernel = model.layers[0].kernel
    halve = tf.function(lambda: (kernel.assign(kernel / 2), None)[1])
    halve()
    model.fit(np.ones((8, 2)), np.ones((8, 1)), batch_size=4, verbose=0)
    halve()
    assert_everywhere(kernel, kernel.numpy())


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


def test_two_variables_are_two_arguments(strategy):
    with strategy.scope():
        first, second = (keras.Variable(START * i) for i in (1, 2))
    move = tf.function(lambda a, b: (a.assign(b), None)[1])
    move(first.value, second.value)
    assert_everywhere(first, START * 2)
    second.assign(START * 5)
    move(second.value, first.value)
    assert_everywhere(second, START * 2)


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


# --- XLA ----------------------------------------------------------------------


def test_an_xla_program_cannot_leave_copies_behind(variable):
    @tf.function(jit_compile=True)
    def program():
        variable.value.assign_add(ONES)

    with pytest.raises(errors.ContextError, match=r"mirrored on .*jit_compile=False"):
        program()
    assert_everywhere(variable, START)


def test_an_xla_program_may_read_a_mirrored_variable(variable):
    program = tf.function(lambda: variable.value * 2.0, jit_compile=True)
    variable.assign(program())
    np.testing.assert_array_equal(program(), START * 4)
    assert_everywhere(variable, START * 2)


def test_a_compiled_step_that_assigns_does_without_xla(strategy):
    with strategy.scope():
        kernel = keras.Variable(START)
        optimizer = keras.optimizers.SGD(1.0)
        optimizer.build([kernel])

    def step(gradient):
        optimizer.apply([gradient], [kernel])

    compiled = ks.function(step, jit_compile=True)
    with pytest.warns(UserWarning, match="without XLA"):
        compiled(tf.constant(ONES))
    compiled(tf.constant(ONES))
    assert_everywhere(kernel, START - 2)


# --- Who reads what -----------------------------------------------------------


def poison(variable, device: str) -> None:
    """Gives the copy on one device, and it alone, other values."""
    (place,) = (
        c.value
        for c in variable.__dict__["_keras_strategies_strategy"].drivers.fit.copies(
            variable
        )
        if c.device == device
    )
    raw = tf.raw_ops.AssignVariableOp
    raw(resource=place.handle, value=tf.constant(100 * START[:2, :1]))


def test_replicas_of_fit_read_their_own_copies(strategy):
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), layers.Dense(1)])
        model.compile("sgd", "mse")
    x = np.ones((12, 2), "float32")
    before = model.predict(x, batch_size=12, verbose=0)
    poison(model.layers[0].kernel, "cpu:1")
    after = model.predict(x, batch_size=12, verbose=0)
    of_replica = np.repeat(
        np.arange(strategy.num_replicas_in_sync), 12 // strategy.num_replicas_in_sync
    )
    np.testing.assert_array_equal(before[of_replica != 1], after[of_replica != 1])
    np.testing.assert_allclose(after[of_replica == 1], 400.0)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("trainable", [False, True])
def test_replicas_of_run_read_their_own_copies(strategy, trainable, compiled):
    with strategy.scope():
        kernel = keras.Variable(START[:2, :1], trainable=trainable)

    def run():
        return strategy.run(lambda: keras.ops.sum(kernel))

    run = ks.function(run) if compiled else run
    poison(kernel, "cpu:1")
    found = [float(value) for value in strategy.experimental_local_results(run())]
    assert found == [4.0, 400.0, 4.0][: len(found)]


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
        np.testing.assert_array_equal(
            tf.convert_to_tensor(own), [[1, 1], [0, 0], [2, 2]]
        )


def test_a_program_that_replicas_share_reads_the_variable_itself(strategy, variable):
    @tf.function
    def shared():
        return variable.value + 0.0

    found = strategy.run(shared), strategy.run(lambda: shared())
    for values in found:
        for own in strategy.experimental_local_results(values):
            np.testing.assert_array_equal(own, START)
    variable.assign_add(ONES)
    for own in strategy.experimental_local_results(strategy.run(lambda: shared())):
        np.testing.assert_array_equal(own, START + 1)


def test_an_update_between_two_reads_is_seen_by_every_replica(strategy, variable):
    def fn():
        before = tf.reduce_sum(variable.value)

        def update(strategy, before):
            variable.assign(variable * 2)

        ks.get_replica_context().merge_call(update, args=(before,))
        return before, tf.reduce_sum(variable.value)

    for run in (lambda: strategy.run(fn), ks.function(lambda: strategy.run(fn))):
        start = variable.numpy().sum()
        before, after = run()
        assert {float(v) for v in strategy.experimental_local_results(before)} == {
            float(start)
        }
        assert {float(v) for v in strategy.experimental_local_results(after)} == {
            float(2 * start)
        }


# --- Which variables are mirrored ---------------------------------------------


def test_layers_that_a_program_builds_have_copies(strategy):
    with strategy.scope():
        layer = layers.Dense(2)
        program = tf.function(lambda x: layer(x))
        program(tf.ones((1, 3)))
    assert_everywhere(layer.kernel, layer.kernel.numpy())


def test_variables_that_wait_for_a_stateless_scope_to_end_have_copies(strategy):
    with strategy.scope():
        with keras.StatelessScope():
            kernel = keras.Variable("ones", (2,))
        assert_everywhere(kernel, [1, 1])


def test_central_storage_and_one_device_keep_one_copy():
    central = ks.CentralStorageStrategy(["cpu:1", "cpu:2"], "cpu:0")
    for strategy in (central, ks.OneDeviceStrategy("cpu:1")):
        with strategy.scope():
            kernel = keras.Variable(START)
        kernel.assign_add(ONES)
        assert len(strategy.drivers.fit.copies(kernel)) == 1
        assert type(kernel.value).__name__ == "ResourceVariable"


def test_a_variable_of_tensorflow_that_is_taken_over_keeps_no_copies(strategy):
    own = tf.Variable(START)
    with strategy.scope():
        kernel = keras.Variable("zeros", (3, 2))
        plain = tf.Variable(START)
    kernel._initialize(own)
    assert list(copies_of(kernel)) == ["cpu:0"]
    assert type(plain).__name__ == "ResourceVariable"


def test_a_deep_copy_is_a_plain_variable(variable):
    other = copy.deepcopy(variable.value)
    other.assign(START * 0)
    assert_everywhere(variable, START)
    np.testing.assert_array_equal(other, START * 0)


def test_copies_go_with_their_variable(strategy):
    with strategy.scope():
        kernel = keras.Variable(START)
    tf.function(lambda v: (v.assign_add(ONES), None)[1])(kernel.value)
    gone = [weakref.ref(place) for place in kernel.value.copies]
    del kernel
    gc.collect()
    assert [ref() for ref in gone] == [None] * len(gone)
