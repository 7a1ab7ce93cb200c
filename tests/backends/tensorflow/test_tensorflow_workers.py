"""Workers on TensorFlow: what its own collectives need beyond the suites of all."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from harness.worker_pool import WorkerPool

import keras_strategies as ks


@pytest.fixture(scope="module")
def pool(forker):
    with contextlib.closing(WorkerPool(forker, 2)) as pool:
        yield pool.cluster(1)


def test_rows_that_only_the_running_program_knows_are_gathered(pool):
    def program(strategy):
        workers, index = strategy.workers, strategy.workers.group.index

        spec = [tf.TensorSpec([None, None], "float32"), tf.TensorSpec([2], "int32")]

        @tf.function(input_signature=spec)
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
