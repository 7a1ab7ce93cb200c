"""Processes that are killed or stopped, and what is left of them."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import threading
import time
import warnings
from pathlib import Path

import keras
import numpy as np
import psutil
import pytest

import keras_strategies as ks
from keras_strategies.parameter_server.coordinator.cluster_processes import EndCause
from keras_strategies.parameter_server.coordinator.cluster_state import QueuedTask
from keras_strategies.processes.local_cluster import LocalTask
from parameter_server import clusters
from parameter_server.scheduler_in_process import Messages, scheduler_of

pytestmark = [
    pytest.mark.one_backend,
    pytest.mark.multiprocess,
]


@pytest.fixture
def coordinator(recovered):
    return ks.ClusterCoordinator(recovered)


@pytest.fixture
def total(recovered):
    """A sum on a server, and steps that count in it."""
    with recovered.scope():
        return keras.Variable(0.0, name="total", trainable=False)


def counting(total, seconds: float = 0.02):
    """A step that adds to a sum and takes a while."""

    def step(x):
        import time

        total.assign_add(x)
        time.sleep(seconds)
        return x

    return step


def deaths(strategy, kind: str, index: int) -> int:
    scheduler = strategy.cluster.scheduler
    states = scheduler.workers if kind == "worker" else scheduler.servers
    return states[index].deaths


def test_a_worker_that_is_killed_is_replaced(recovered, coordinator, total) -> None:
    before = deaths(recovered, "worker", 0)
    step = counting(total)
    results = [coordinator.schedule(step, args=(1.0,)) for _ in range(40)]
    clusters.wait_until(lambda: results[3].is_done(), "steps are done")
    clusters.kill(recovered, "worker", 0)
    coordinator.join(clusters.SECONDS)
    assert float(total.numpy()) == 40.0
    assert coordinator.fetch(results) == [1.0] * 40
    clusters.wait_until_whole(recovered)
    assert deaths(recovered, "worker", 0) == before + 1


def test_a_push_counts_once_when_its_closure_runs_again(
    coordinator, total, tmp_path
) -> None:
    """The worker dies after its push and before it has said so."""
    marker = str(tmp_path / "died")

    def step():
        import os
        import signal

        total.assign_add(1.0)
        total.assign_add(10.0)
        if not os.path.exists(marker):
            open(marker, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        total.assign_add(100.0)
        return os.getpid()

    result = coordinator.schedule(step)
    coordinator.join(clusters.SECONDS)
    assert result.fetch() > 0 and os.path.exists(marker)
    assert float(total.numpy()) == 111.0


@pytest.mark.slow(seconds=6)
def test_a_stopped_worker_is_replaced(recovered, coordinator, total) -> None:
    before = deaths(recovered, "worker", 1)
    step = counting(total)
    pid = clusters.kill(recovered, "worker", 1, signal.SIGSTOP)
    began = time.monotonic()
    for _ in range(20):
        coordinator.schedule(step, args=(1.0,))
    coordinator.join(clusters.SECONDS)
    assert float(total.numpy()) == 20.0
    assert deaths(recovered, "worker", 1) == before + 1
    # Its deadline, and some time for the others to make its steps.
    silence = recovered.cluster.options.silence_seconds
    assert time.monotonic() - began < silence + 20
    clusters.wait_until(lambda: not psutil.pid_exists(pid), "the stopped one is gone")


@pytest.mark.slow(seconds=6)
def test_fit_goes_on_while_a_worker_stands_still(recovered) -> None:
    """Callbacks wait for its step, other workers do not."""
    x, y = clusters.clicks(rows=1200)
    with recovered.scope():
        model = clusters.two_inputs("sgd")
    model.fit(x, y, batch_size=8, verbose=0)
    other = recovered.cluster.scheduler.workers[1]
    ended, threads, meanwhile = [], [], []

    def end(batch, logs):
        ended.append(batch)
        if batch == 10:
            pid = clusters.kill(recovered, "worker", 0, signal.SIGSTOP)
            before = other.steps

            def resume():
                try:
                    clusters.wait_until(
                        lambda: other.steps > before + 20, "another goes on"
                    )
                    meanwhile.append(other.steps - before)
                finally:
                    # After `silence_seconds` it would have been replaced.
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGCONT)

            threads.append(threading.Thread(target=resume))
            threads[0].start()

    watch = keras.callbacks.LambdaCallback(on_train_batch_end=end)
    model.fit(x, y, batch_size=8, verbose=0, callbacks=[watch])
    threads[0].join()
    assert meanwhile
    assert ended == list(range(150))
    assert int(model.optimizer.iterations.numpy()) == 300


# By a fault of its own, or by the kernel when memory runs out.
DEADLY = {
    signal.SIGSEGV: "3 workers in turn died .* was ended by SIGSEGV",
    signal.SIGKILL: "10 workers in turn were lost .* SIGKILL.* memory",
}


@pytest.mark.parametrize("number", DEADLY)
def test_a_function_that_ends_its_workers_is_given_up(coordinator, number) -> None:
    def deadly():
        import os

        os.kill(os.getpid(), number)

    coordinator.schedule(deadly)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(ks.errors.WorkerError, match=DEADLY[number]):
            coordinator.join(clusters.SECONDS)
    found = [str(w.message) for w in caught if "in turn were lost" in str(w.message)]
    assert len(found) == (number == signal.SIGKILL)
    assert coordinator.schedule(lambda: 5).fetch(clusters.SECONDS) == 5


def test_ends_from_outside_count_while_servers_answer() -> None:
    messages, processes = Messages(), clusters.RecordedProcesses()
    scheduler = scheduler_of(messages, processes, can_restore=True)
    cause = EndCause("it was ended by SIGTERM", is_from_outside=True)
    worker, results = scheduler.workers[0], []

    def end_worker(life: int) -> None:
        clusters.wait_until(lambda: worker.in_flight, "it has the task")
        processes.ends.append((LocalTask("worker", 0, life), cause))
        clusters.wait_until(lambda: worker.incarnation > life, "it has ended")
        if not results:
            started = (0, life + 1, 51 + life, "cpu:0")
            messages.put(b"w%d" % (life + 1), "worker", started)

    try:
        task = QueuedTask(0, b"", 0, lambda *found: results.append(found), (), None)
        scheduler.schedule(task)
        processes.ends.append((LocalTask("ps", 0, 0), cause))
        clusters.wait_until(lambda: not scheduler.servers[0].is_ready, "it has ended")
        for life in range(12):
            end_worker(life)
        messages.put(b"ps", "server", (0, 1, 61, True, "", "ipc://ps"))
        clusters.wait_until(lambda: scheduler.servers[0].is_ready, "it is restarted")
        assert task.deaths.total == 0 and not worker.is_abandoned
        # The worker finishes other tasks.
        worker.steps += 1
        for life in range(12, 21):
            end_worker(life)
        assert task.deaths.outside == 9 and not results
        end_worker(21)
        assert "10 workers in turn were lost" in str(results[0][1])
    finally:
        scheduler.close()


def test_a_server_loses_at_most_what_came_after_its_snapshot(
    recovered, coordinator, total
) -> None:
    server = recovered.registry.describe(total).shards[0].server
    known: list[float] = []
    step = counting(total, 0.005)
    until = time.monotonic() + 5 * clusters.SNAPSHOT_SECONDS
    while time.monotonic() < until:
        coordinator.schedule(step, args=(1.0,)).fetch(clusters.SECONDS)
        known.append(time.monotonic())
    died = time.monotonic()
    clusters.kill(recovered, "ps", server)
    # Twice the interval, because this machine may be busy with other tests.
    kept = sum(moment < died - 2 * clusters.SNAPSHOT_SECONDS for moment in known)
    assert kept > 10
    more = [coordinator.schedule(step, args=(1.0,)) for _ in range(10)]
    coordinator.join(clusters.SECONDS)
    assert coordinator.fetch(more) == [1.0] * 10
    assert kept + 10 <= float(total.numpy()) <= len(known) + 10


def updates(strategy, coordinator, table, optimizer):
    """Makes so many updates of rows 1 and 4 of a table, one after the other."""

    def step():
        def loss_fn():
            return keras.ops.sum(keras.ops.take(table, np.array([1, 4]), axis=0))

        _, gradients = ks.value_and_grad(loss_fn, [table])()
        optimizer.apply(gradients, [table])

    def run(times: int) -> None:
        for _ in range(times):
            coordinator.schedule(lambda: strategy.run(step)).fetch(clusters.SECONDS)

    return run


def test_nothing_is_lost_that_is_in_a_snapshot(recovered, coordinator) -> None:
    with recovered.scope():
        table = keras.Variable(np.zeros((10, 2)), name="table", dtype="float32")
        optimizer = keras.optimizers.SGD(1.0, momentum=0.5)
        optimizer.build([table])
    server = recovered.registry.describe(table).shards[0].server

    run = updates(recovered, coordinator, table, optimizer)
    run(2)
    recovered.cluster.servers.request(server, "snapshot")
    # What is made after a snapshot is there again, too.
    with recovered.scope():
        late = keras.Variable(np.arange(4.0), name="late", dtype="float32")
        later = keras.Variable(np.arange(4.0), name="later", dtype="float32")
    clusters.kill(recovered, "ps", server)
    run(1)
    coordinator.join(clusters.SECONDS)
    # Steps of 1, 1.5 and 1.75.
    np.testing.assert_allclose(table.numpy()[[0, 1, 4], 0], [0, -4.25, -4.25])
    np.testing.assert_array_equal(late.numpy(), later.numpy())


@contextlib.contextmanager
def without_a_folder(folder: Path):
    """Puts a file where the folder of snapshots was."""
    aside = folder.with_name("aside")
    folder.rename(aside)
    folder.write_text("")
    try:
        yield
    finally:
        folder.unlink()
        aside.rename(folder)


@pytest.mark.nightly
@pytest.mark.slow(seconds=11)
def test_snapshots_that_cannot_be_written(
    recovered, coordinator, total, monkeypatch
) -> None:
    scheduler = recovered.cluster.scheduler
    server = recovered.registry.describe(total).shards[0].server
    made = 0

    def train() -> None:
        nonlocal made
        until = time.monotonic() + 10
        while time.monotonic() < until:
            coordinator.schedule(counting(total), args=(1.0,)).fetch(clusters.SECONDS)
            made += 1

    with without_a_folder(Path(recovered.cluster.options.snapshot_folder)):
        with pytest.raises(ks.errors.SnapshotError, match=r"Not a directory.* intact"):
            train()
        assert float(total.numpy()) == made
        with monkeypatch.context() as patch:
            patch.setattr(scheduler, "snapshot_problem", None)
            options = dataclasses.replace(
                scheduler._options, on_snapshot_error="continue"
            )
            patch.setattr(scheduler, "_options", options)
            patch.setattr(scheduler.tasks, "error", None)
            with pytest.warns(UserWarning, match="continues without snapshots"):
                train()
    recovered.cluster.servers.request(server, "snapshot")
    clusters.wait_until(lambda: scheduler.snapshot_problem is None, "it is written")
    coordinator.join(clusters.SECONDS)
    assert float(total.numpy()) == made


def test_a_lost_server_without_snapshots_is_an_error() -> None:
    with clusters.start(workers=1, ps=1) as strategy:
        scheduler = strategy.cluster.scheduler
        coordinator = ks.ClusterCoordinator(strategy)
        with strategy.scope():
            total = keras.Variable(np.zeros(3), name="total")
        clusters.kill(strategy, "ps", 0)
        clusters.wait_until(lambda: scheduler.tasks.fatal is not None, "it is noticed")
        with pytest.raises(ks.errors.ServerLostError, match="snapshot_seconds"):
            coordinator.schedule(lambda: total.numpy())
        with pytest.raises(ks.errors.ServerLostError, match="Parameter server 0 died"):
            coordinator.join()
        worker = psutil.Process(scheduler.workers[0].pid)
    assert not scheduler._thread.is_alive()
    with pytest.raises(ks.errors.WorkerError, match="has been closed"):
        total.numpy()
    _, alive = psutil.wait_procs([worker], timeout=10)
    assert not alive


def test_a_damaged_snapshot_is_not_used(recovered, coordinator, total) -> None:
    about = recovered.registry.describe(total)
    server = about.shards[0].server
    for _ in range(2):
        coordinator.schedule(counting(total), args=(1.0,)).fetch(clusters.SECONDS)
        path = Path(recovered.cluster.servers.request(server, "snapshot"))
    path.write_bytes(path.read_bytes()[:-1])
    clusters.kill(recovered, "ps", server)
    with pytest.warns(UserWarning, match=rf"(?s){path.name} is damaged.* restored"):
        coordinator.schedule(counting(total), args=(1.0,))
        coordinator.join(clusters.SECONDS)
        coordinator.join()
    assert float(total.numpy()) == 2.0


@pytest.mark.slow(seconds=6)
def test_a_stopped_server_is_replaced(recovered, coordinator, total) -> None:
    server = recovered.registry.describe(total).shards[0].server
    before = deaths(recovered, "ps", server)
    coordinator.schedule(counting(total), args=(1.0,)).fetch(clusters.SECONDS)
    recovered.cluster.servers.request(server, "snapshot")
    clusters.kill(recovered, "ps", server, signal.SIGSTOP)
    for _ in range(5):
        coordinator.schedule(counting(total), args=(1.0,))
    coordinator.join(clusters.SECONDS)
    # One that is killed a second time loses what came after its last snapshot.
    assert deaths(recovered, "ps", server) == before + 1
    assert float(total.numpy()) == 6.0


def test_a_worker_joins_and_works(recovered, coordinator) -> None:
    index = coordinator.add_worker()
    clusters.wait_until_whole(recovered)

    def who():
        import time

        time.sleep(0.05)
        return ks.get_current_worker_index()

    found = coordinator.fetch([coordinator.schedule(who) for _ in range(24)])
    assert index in found
    assert f"worker {index}" in str(coordinator.status())


@pytest.mark.one_backend("tensorflow")
def test_fit_and_evaluate_are_exact_while_workers_die(recovered) -> None:
    class Killer(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 3 and clusters.is_whole(recovered):
                clusters.kill(recovered, "worker", 0)

        def on_test_batch_end(self, batch, logs=None):
            if batch == 2:
                clusters.wait_until_whole(recovered)
                clusters.kill(recovered, "worker", 1)

    class Rows(keras.metrics.Metric):
        """Counts rows."""

        def __init__(self):
            super().__init__(name="rows")
            self.rows = self.add_weight(name="rows", initializer="zeros")

        def update_state(self, y_true, y_pred, sample_weight=None):
            self.rows.assign_add(keras.ops.sum(keras.ops.ones_like(y_true)))

        def result(self):
            return self.rows.value

    x, y = clusters.clicks(96)
    with recovered.scope():
        model = clusters.two_inputs(keras.optimizers.SGD(0.01))
        model.compile(keras.optimizers.SGD(0.01), "mse", metrics=["mae", Rows()])
    history = model.fit(
        x, y, batch_size=8, epochs=2, verbose=0, callbacks=[Killer()]
    ).history
    assert history["rows"] == [96.0, 96.0]
    assert int(keras.ops.convert_to_numpy(model.optimizer.iterations)) == 24

    expected = model.evaluate(x, y, batch_size=8, verbose=0, return_dict=True)
    found = model.evaluate(
        x, y, batch_size=8, verbose=0, return_dict=True, callbacks=[Killer()]
    )
    assert found["rows"] == 96.0
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, err_msg=name)
