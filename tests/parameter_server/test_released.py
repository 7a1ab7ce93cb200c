"""Variables, optimizers and functions that no longer exist leave the cluster."""

from __future__ import annotations

import gc
import os
import time

import keras
import numpy as np
import pytest

import keras_strategies as ks
from keras_strategies.parameter_server.server.request_handler import ParameterServer
from parameter_server import clusters

pytestmark = pytest.mark.one_backend


def test_a_restored_server_does_not_bring_them_back(tmp_path) -> None:
    server = ParameterServer(0, str(tmp_path))
    server.handle(("begin", "me"))
    values = np.zeros(1000, "float32")
    server.handle(("create", [((0, 0), values), ((1, 0), values)]))
    for _ in range(2):  # Requests may be repeated.
        server.handle(("delete", [(0, 0)]))
    again = ParameterServer(0, str(tmp_path))
    for each in (server, again):
        found = each.handle(("status", None))
        assert (found["shards"], found["nbytes"]) == (1, 4000)


def on_servers(strategy) -> list[tuple[int, int]]:
    """Numbers of shards and of optimizers on each server."""
    servers = strategy.cluster.servers
    found = servers.request_all("status", dict.fromkeys(range(len(servers))))
    return [(status["shards"], status["optimizers"]) for status in found.values()]


def on_worker():
    """Numbers of variables, objects and programs on the worker that runs this."""
    from keras_strategies.runtime import context

    worker = context.current_strategy()._worker
    return (
        len(worker._variables.by_number),
        len(worker._variables.objects),
        len(worker.programs._programs),
    )


def train() -> list[float]:
    x, y = clusters.clicks()
    model = clusters.two_inputs("adam")
    model.fit(x, y, batch_size=8, verbose=0)
    model.evaluate(x, y, batch_size=48, verbose=0)
    return model.predict(x, verbose=0)[:, 0].tolist()


@pytest.mark.multiprocess
def test_models_that_no_longer_exist_leave_the_cluster(synchronous) -> None:
    coordinator = ks.ClusterCoordinator(synchronous)

    def release() -> tuple:
        gc.collect()
        coordinator.join(clusters.SECONDS)
        on_the_worker = coordinator.schedule(on_worker).fetch(clusters.SECONDS)
        return on_servers(synchronous), on_the_worker

    coordinator.schedule(on_worker).fetch(clusters.SECONDS)
    before = release()
    found = []
    for _ in range(2):
        with synchronous.scope():
            found.append(train())
        assert release() == before
    np.testing.assert_allclose(*found, rtol=1e-5)


@pytest.mark.multiprocess
def test_a_task_has_what_it_uses_until_it_is_done(synchronous) -> None:
    coordinator = ks.ClusterCoordinator(synchronous)

    def scheduled(value):
        """A function of variables that nothing else refers to."""
        with synchronous.scope():
            total = keras.Variable(value, name="total", trainable=False)

        def step():
            import time

            time.sleep(0.2)
            total.assign_add(1.0)
            return float(total.numpy())

        return coordinator.schedule(step)

    found = [scheduled(value) for value in (1.0, 2.0, 3.0)]
    gc.collect()
    assert coordinator.fetch(found) == [2.0, 3.0, 4.0]


@pytest.mark.multiprocess
def test_a_function_is_sent_again_when_it_refers_to_another_model(synchronous) -> None:
    coordinator = ks.ClusterCoordinator(synchronous)
    total = None

    def step():
        return float(total.numpy())

    for value in (1.0, 2.0):
        with synchronous.scope():
            total = keras.Variable(value, name="total", trainable=False)
        gc.collect()
        assert coordinator.schedule(step).fetch(clusters.SECONDS) == value


def values_on_workers(strategy) -> dict[int, int]:
    """Number of values that exist once per worker, by worker."""

    def count():
        from keras_strategies.runtime import context

        worker = context.current_strategy()._worker
        # Another function for another worker.
        time.sleep(0.02)
        return worker.index, len(worker._functions._values)

    coordinator = ks.ClusterCoordinator(strategy)
    found: dict[int, int] = {}
    while len(found) < len(strategy.cluster.scheduler.workers):
        calls = [coordinator.schedule(count) for _ in range(4)]
        found |= dict(call.fetch(clusters.SECONDS) for call in calls)
    return found


def test_values_of_workers_are_released_with_their_handles(synchronous) -> None:
    """As in `tf.distribute`, the tests of which count the resources of a worker."""
    coordinator = ks.ClusterCoordinator(synchronous)

    def dataset():
        while True:
            yield np.full(3, ks.get_current_worker_index())

    def first(iterator, values):
        return next(iterator), values["index"]

    before = values_on_workers(synchronous)
    datasets = coordinator.create_per_worker_dataset(dataset)
    values = coordinator.create_per_worker_values(
        lambda: {"index": ks.get_current_worker_index()}
    )
    for _ in range(3):
        iterator = iter(datasets)
        result = coordinator.schedule(first, args=(iterator, values))
        rows, index = result.fetch(clusters.SECONDS)
        # Functions of datasets and values know their worker.
        assert index in before and set(rows) == {index}
    del iterator, result
    gc.collect()
    clusters.wait_until(
        lambda: values_on_workers(synchronous) == {i: n + 2 for i, n in before.items()},
        "the iterators have left the workers",
    )
    iterator = iter(datasets)
    waiting = [coordinator.schedule(first, args=(iterator, values)) for _ in range(5)]
    del datasets, values, iterator
    gc.collect()
    # What scheduled functions use exists until they have run.
    assert [len(call.fetch(clusters.SECONDS)[0]) for call in waiting] == [3] * 5
    gc.collect()
    clusters.wait_until(
        lambda: values_on_workers(synchronous) == before, "all values have left"
    )


@pytest.mark.multiprocess
def test_memory_of_a_worker_over_epochs_of_iterators_is_flat(synchronous) -> None:
    """Each iterator holds a mebibyte on the worker."""
    coordinator = ks.ClusterCoordinator(synchronous)

    class Rows:
        def __iter__(self):
            rows = np.ones(1 << 17)
            while True:
                yield rows

    def resident_bytes(iterator):
        assert next(iterator).shape
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    datasets = coordinator.create_per_worker_dataset(Rows)

    def epochs(count: int) -> int:
        for _ in range(count):
            scheduled = coordinator.schedule(resident_bytes, args=(iter(datasets),))
            found = scheduled.fetch(clusters.SECONDS)
        return found

    early = epochs(100)
    assert epochs(400) - early < 50 << 20
