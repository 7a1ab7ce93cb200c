"""`ClusterCoordinator`: scheduling, values, datasets, errors."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import keras_strategies as ks
from parameter_server import clusters

pytestmark = [pytest.mark.one_backend, pytest.mark.multiprocess]


def test_there_is_one_coordinator(strategy, coordinator) -> None:
    assert ks.ClusterCoordinator(strategy) is coordinator
    with pytest.raises(ks.errors.InvalidArgumentError, match="ParameterServerStrategy"):
        ks.ClusterCoordinator(ks.OneDeviceStrategy("cpu:0"))
    with pytest.raises(TypeError, match="must be callable"):
        coordinator.schedule(3)


def test_workers_know_their_numbers(coordinator) -> None:
    numbers = [coordinator.schedule(ks.get_current_worker_index) for _ in range(8)]
    alive = set(coordinator.strategy.cluster.scheduler.workers)
    assert {value.fetch(clusters.SECONDS) for value in numbers} <= alive
    assert ks.get_current_worker_index() is None


def test_a_custom_loop_over_each_workers_dataset(strategy, coordinator) -> None:
    with strategy.scope():
        table = keras.Variable(np.zeros((1000, 2)), name="table", dtype="float32")
        optimizer = keras.optimizers.SGD(1.0)
        metric = keras.metrics.Mean()

    def dataset():
        for i in range(1000):
            yield (
                np.array([1, 3, 3], "int32"),
                np.full((3, 2), float(i >= 0), "float32"),
            )

    def replica_step(ids, target):
        def loss_fn(ids, target):
            rows = keras.ops.take(table, ids, axis=0)
            return keras.ops.sum(rows * target)

        loss, gradients = ks.value_and_grad(loss_fn, [table])(ids, target)
        optimizer.apply(gradients, [table])
        metric.update_state(1.0)
        return loss

    def step(iterator):
        return strategy.run(replica_step, args=next(iterator))

    iterator = iter(coordinator.create_per_worker_dataset(dataset))
    for _ in range(6):
        coordinator.schedule(step, args=(iterator,))
    coordinator.join(clusters.SECONDS)

    expected = np.zeros((1000, 2))
    expected[1], expected[3] = -6, -12
    np.testing.assert_allclose(table.numpy(), expected)
    assert int(keras.ops.convert_to_numpy(optimizer.iterations)) == 6
    assert float(metric.result()) == 1.0
    status = coordinator.status()
    assert status.steps >= 6


@pytest.mark.parametrize(
    ("cost", "expected"),
    [
        # The gradient of half the squares is the table itself.
        (lambda rows, table: rows + keras.ops.sum(table * table) / 2, [0, -1, 0, -2]),
        (
            lambda rows, table: rows * keras.ops.stop_gradient(keras.ops.sum(table)),
            [1, 1 - 8, 1, 1 - 16],
        ),
    ],
    ids=["with gradient", "without"],
)
def test_a_table_that_is_read_whole_travels_whole(
    strategy, coordinator, cost, expected
) -> None:
    with strategy.scope():
        table = keras.Variable(np.ones((4, 2)), name="table", dtype="float32")
        optimizer = keras.optimizers.SGD(1.0)
        optimizer.build([table])

    def replica_step(ids):
        def loss_fn(ids):
            rows = keras.ops.sum(keras.ops.take(table, ids, axis=0))
            return cost(rows, table)

        _, gradients = ks.value_and_grad(loss_fn, [table])(ids)
        optimizer.apply(gradients, [table])

    def step():
        strategy.run(replica_step, args=(np.array([1, 3, 3], "int32"),))

    coordinator.schedule(step).fetch(clusters.SECONDS)
    np.testing.assert_allclose(table.numpy(), np.repeat([expected], 2, 0).T)


def test_losses_of_custom_loops_are_of_the_workers_batch(strategy, coordinator) -> None:
    """A worker's replica is the only one of its step."""
    with strategy.scope():
        factor = keras.Variable(2.0, name="factor")

    def replica_step(losses):
        replica = ks.get_replica_context()
        assert replica.num_replicas_in_sync == 1
        average = ks.compute_average_loss(factor * losses)
        penalty = ks.scale_regularization_loss([factor * 1.0])
        return average, penalty, replica.all_reduce("SUM", factor * 3.0)

    def step():
        return strategy.run(replica_step, args=(np.array([1, 2, 6], "float32"),))

    found = coordinator.schedule(step).fetch(clusters.SECONDS)
    assert [float(value) for value in found] == [6, 2, 6]


def test_values_are_each_workers_own(coordinator) -> None:
    def make():
        return {"calls": 0}

    def count(box):
        box["calls"] += 1
        return ks.get_current_worker_index(), box["calls"]

    box = coordinator.create_per_worker_values(make)
    found = [coordinator.schedule(count, args=(box,)) for _ in range(10)]
    pairs = coordinator.fetch(found)
    for worker in {worker for worker, _ in pairs}:
        calls = [call for w, call in pairs if w == worker]
        assert sorted(calls) == list(range(1, len(calls) + 1))


def test_the_first_error_surfaces_once(coordinator) -> None:
    def fail():
        raise ZeroDivisionError("as planned")

    def wait():
        return 1

    failing = coordinator.schedule(fail)
    with pytest.raises(ZeroDivisionError, match="as planned") as raised:
        for _ in range(100):
            coordinator.schedule(wait)
        coordinator.join(clusters.SECONDS)
    assert "Raised on worker" in "".join(raised.value.__notes__)
    with pytest.raises(ZeroDivisionError):
        failing.fetch(clusters.SECONDS)
    assert coordinator.done()
    assert coordinator.schedule(wait).fetch(clusters.SECONDS) == 1
    coordinator.join(clusters.SECONDS)


def test_what_cannot_be_sent_is_said(coordinator) -> None:
    import threading

    lock = threading.Lock()
    with pytest.raises(TypeError, match="lock") as raised:
        coordinator.schedule(lambda: lock)
    assert "create_per_worker_values" in "".join(raised.value.__notes__)


def test_a_function_sees_what_others_write_while_it_runs(
    strategy, coordinator, tmp_path
) -> None:
    """A stop flag, as in `tf.distribute`, where each read asks the server."""
    with strategy.scope():
        stop = keras.Variable(False, dtype="bool", trainable=False)
        rows = keras.Variable(np.zeros((3, 2)), trainable=False, dtype="float32")

    def poll():
        assert not stop.numpy() and not rows[1][0]
        (tmp_path / "read").touch()
        while not stop.numpy():
            pass
        return np.asarray(keras.ops.convert_to_numpy(rows[1]))

    polling = coordinator.schedule(poll)
    clusters.wait_until((tmp_path / "read").exists, "the function has read both")
    rows.assign(np.ones((3, 2)))
    stop.assign(True)
    np.testing.assert_array_equal(polling.fetch(clusters.SECONDS), [1, 1])
