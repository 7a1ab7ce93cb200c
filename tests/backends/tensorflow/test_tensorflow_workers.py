"""Workers on TensorFlow: what its own collectives need beyond the suites of all."""

from __future__ import annotations

import socket
from pathlib import Path

import keras
import numpy as np
import pytest
from harness.forker import Forker
from harness.worker_pool import WorkerPool

import keras_strategies as ks

if keras.backend.backend() != "tensorflow":
    pytest.skip("tests of the TensorFlow backend", allow_module_level=True)

import tensorflow as tf


@pytest.fixture(scope="module")
def forker():
    with Forker() as made:
        yield made


@pytest.fixture(scope="module")
def pool(forker):
    pool = WorkerPool(forker, 2)
    yield pool.cluster(1)
    pool.close()


# Collectives.


def test_tensors_of_every_kind_travel(pool):
    def program(strategy):
        workers, index = strategy.workers, strategy.workers.group.index
        found = {}
        for name in (
            *("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32"),
            *("int64", "uint64", "float16", "bfloat16", "float32", "float64"),
        ):
            rows = [1, 2]
            own = tf.cast(tf.fill([rows[index], 2], index), name)
            joined = workers.gather_rows(own, rows)
            sent = workers.broadcast([own[:1], own[:1]])
            assert joined.dtype.name == sent[0].dtype.name == name
            found[name] = tf.cast(joined, "float32").numpy().tolist()
            found[name] += [tf.cast(part, "float32").numpy().tolist() for part in sent]
        return found

    expected = [[0, 0], [1, 1], [1, 1], [[0, 0]], [[0, 0]]]
    for found in pool(program):
        assert found == dict.fromkeys(found, expected)


def test_reductions_of_many_tensors_are_packed(pool):
    def program(strategy):
        workers, index = strategy.workers, strategy.workers.group.index
        values = [tf.fill([3, i + 1], float(index + i)) for i in range(5)]
        values.insert(2, tf.constant([index + 1], "int64"))

        @tf.function
        def reduced():
            return workers.all_reduce(ks.ReduceOp.SUM, values)

        operations = reduced.get_concrete_function().graph.get_operations()
        count = sum(op.type == "CollectiveReduceV2" for op in operations)
        largest = workers.all_reduce(ks.ReduceOp.MAX, values)
        mean = workers.all_reduce(ks.ReduceOp.MEAN, [tf.constant(2.0 * index)])
        sums = [value.numpy().tolist() for value in reduced()]
        return count, sums, [v.numpy().max() for v in largest], float(mean[0])

    for count, sums, largest, mean in pool(program):
        assert count == 3  # Those before the integers, they, and those after them.
        assert sums[2] == [3]
        floats = sums[:2] + sums[3:]
        assert floats == [[[1.0 + 2 * i] * (i + 1)] * 3 for i in range(5)]
        assert largest == [1, 2, 2, 3, 4, 5]
        assert mean == 1


def test_rows_that_only_the_running_program_knows_are_gathered(pool):
    def program(strategy):
        workers, index = strategy.workers, strategy.workers.group.index

        @tf.function(
            input_signature=[
                tf.TensorSpec([None, None], "float32"),
                tf.TensorSpec([2], "int32"),
            ]
        )
        def gathered(own, rows):
            told = workers.gather_rows(own, tf.unstack(rows, 2))
            asked = workers.gather_rows(own, [None, None])
            return told, asked, workers.all_reduce(ks.ReduceOp.SUM, [told])[0]

        found = []
        for rows, width in [([2, 3], 2), ([2, 3], 1), ([0, 1], 2), ([2, 2], 3)] * 2:
            own = tf.fill([rows[index], width], float(index + 1))
            told, asked, total = gathered(own, tf.constant(rows))
            assert np.array_equal(told, asked)
            assert np.array_equal(total, 2 * told)
            found.append(told.numpy().tolist())
        return found

    expected = [
        [[1, 1]] * 2 + [[2, 2]] * 3,
        [[1]] * 2 + [[2]] * 3,
        [[2, 2]],
        [[1, 1, 1]] * 2 + [[2, 2, 2]] * 2,
    ]
    for found in pool(program):
        assert found == expected * 2


def test_strategies_of_one_process_have_one_table_of_keys(pool):
    """Two tables would give the key of one shape to another."""

    def program(strategy):
        found = []
        for width in (5, 6):
            own = ks.MultiWorkerMirroredStrategy(devices=["cpu:0"])
            workers, index = own.workers, own.workers.group.index

            @tf.function(input_signature=[tf.TensorSpec([None, None], "float32")])
            def gathered(rows, workers=workers):
                return workers.gather_rows(rows, [None, None])

            joined = gathered(tf.fill([2, width], float(index)))
            found.append(joined.numpy().tolist())
        return found

    expected = [[[0.0] * width] * 2 + [[1.0] * width] * 2 for width in (5, 6)]
    for found in pool(program):
        assert found == expected


# Training.


def saliency(strategy):
    """The gradient of a loss by the inputs, through a frozen layer."""
    keras.utils.set_random_seed(3)
    with strategy.scope():

        class Model(keras.Model):
            def __init__(self):
                super().__init__()
                self.hidden = keras.layers.Dense(4, "tanh")
                self.hidden.trainable = False
                self.out = keras.layers.Dense(2)

            def call(self, x):
                return self.out(self.hidden(x))

            def test_step(self, data):
                x, y = data
                with tf.GradientTape() as tape:
                    tape.watch(x)
                    loss = self.compute_loss(x, y, self(x))
                gradient = tape.gradient(loss, x)
                return {
                    "along": tf.reduce_sum(gradient * x),
                    "last": tf.reduce_sum(gradient[-1] ** 2),
                }

        model = Model()
        model.compile("sgd", "mse")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(7, 3)).astype("float32")
    y = rng.normal(size=(7, 2)).astype("float32")
    model(x[:1])
    return model.evaluate(x, y, batch_size=7, verbose=0, return_dict=True)


def test_gradients_of_inputs_are_those_of_one_device(pool):
    expected = saliency(ks.OneDeviceStrategy("cpu:0"))
    for found in pool(saliency):
        assert found == pytest.approx(expected, rel=1e-5)


def test_rows_of_a_table_travel_as_rows(pool):
    def program(strategy):
        ids = np.arange(15).reshape(5, 3) % 9
        with strategy.scope():
            table = keras.layers.Embedding(9, 2, "ones")
            model = keras.Sequential([keras.Input((3,)), table])
            # Adam squares each row on TensorFlow, before it sums those of one index.
            model.compile("adam", "mse")
        seen = []
        apply = model.optimizer.apply

        def applied(gradients, variables):
            seen.extend(gradients)
            return apply(gradients, variables)

        model.optimizer.apply = applied
        targets = np.arange(30, dtype="float32").reshape(5, 3, 2)
        model.fit(ids, targets, batch_size=5, verbose=0)
        gradient = seen[-1]
        kind = isinstance(gradient, tf.IndexedSlices), gradient.values.shape.rank
        return kind, model.get_weights()[0].tolist()

    kind, expected = program(ks.OneDeviceStrategy("cpu:0"))
    for found_kind, found in pool(program):
        assert found_kind == kind == (True, 2)
        np.testing.assert_allclose(found, expected, 1e-6)


def test_the_servers_of_one_machine_accept_nobody_elses_connections(pool):
    def program(strategy):
        import os

        found = []
        for name in os.listdir("/proc/self/fd"):
            try:
                each = socket.socket(fileno=os.dup(int(name)))
            except OSError:
                continue
            with each:
                if not each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    continue
                host = each.getsockname()[0]
                device = each.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16)
                found.append((host, device.rstrip(b"\0")))
        return found

    for servers in pool(program):
        assert servers
        for host, device in servers:
            assert host == "127.0.0.1" or device == b"lo", servers


# Threads.


def _collectives(strategy):
    workers = strategy.workers

    def step():
        workers.gather_rows(tf.ones([1 + workers.group.index, 2]), [1, 2])
        workers.gather_rows(tf.ones([1 + workers.group.index, 2]), [None, None])
        workers.broadcast([tf.ones([2])])

    return step


def _loop(strategy):
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build(model.trainable_variables)

    def on_replica(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(x))
        gradients = tape.gradient(loss, [v.value for v in model.trainable_variables])
        optimizer.apply(gradients)
        return loss

    @ks.function
    def train():
        losses = strategy.run(on_replica, (tf.ones([2, 4]),))
        return strategy.reduce("sum", losses, axis=None)

    return train


@pytest.mark.parametrize("way", [_loop, _collectives])
def test_steps_leave_no_threads(pool, way):
    """TensorFlow has a sleeping thread for each collective with a timeout."""

    def program(strategy):
        step = way(strategy)

        def threads():
            return len(list(Path("/proc/self/task").iterdir()))

        for _ in range(3):
            step()
        before = threads()
        for _ in range(60):
            step()
        return threads() - before

    for more in pool(program):
        assert more < 30
