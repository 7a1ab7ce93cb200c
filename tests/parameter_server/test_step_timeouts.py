"""`step_timeout_seconds`: steps that hang while their process lives."""

from __future__ import annotations

import dataclasses

import keras
import pytest

import keras_strategies as ks
from keras_strategies.parameter_server.coordinator.cluster_state import QueuedTask
from keras_strategies.parameter_server.wire.task_messages import TaskResult
from keras_strategies.processes.local_cluster import LocalTask
from parameter_server import clusters
from parameter_server.scheduler_in_process import Messages, scheduler_of, tasks_sent

pytestmark = pytest.mark.one_backend


def run_late(messages, processes, life: int) -> None:
    """A process of worker 0 that receives a task and is ended during it."""
    sender = b"w%d" % life
    if life:
        messages.put(sender, "worker", (0, life, 50 + life, "cpu:0"))
    clusters.wait_until(lambda: len(tasks_sent(messages)) > life, "it has a task")
    assert tasks_sent(messages)[life] == sender
    clusters.wait_until(lambda: len(processes.killed) > life, "it is ended")
    assert processes.killed[life] == LocalTask("worker", 0, life)
    # What it still reports comes too late.
    messages.put(sender, "result", TaskResult(0, "late"))


def test_a_late_step_goes_to_another_worker_and_fails_in_the_end() -> None:
    messages, processes = Messages(), clusters.RecordedProcesses()
    scheduler = scheduler_of(messages, processes, step_timeout_seconds=0.3)
    results = []
    try:
        scheduler.schedule(
            QueuedTask(0, b"", 0, lambda *found: results.append(found), (), None)
        )
        for life in range(3):
            run_late(messages, processes, life)
        clusters.wait_until(lambda: results, "it is given up")
        assert len(scheduler.tasks.warnings) == 2
        assert "Worker 0 was ended" in scheduler.tasks.warnings[0]
        assert "function 'step' did not finish" in scheduler.tasks.warnings[0]
        with (
            pytest.warns(UserWarning, match="count once"),
            pytest.raises(ks.errors.ClusterTimeoutError, match="3 workers in turn"),
        ):
            scheduler.tasks.wait_until_done(clusters.SECONDS)
        assert len(results) == 1 and "function 'step'" in str(results[0][1])
    finally:
        scheduler.close()


def test_time_without_a_server_does_not_count() -> None:
    messages, processes = Messages(), clusters.RecordedProcesses()
    scheduler = scheduler_of(messages, processes, step_timeout_seconds=0.3)
    try:
        with scheduler.condition:
            scheduler.servers[0].is_ready = False
        scheduler.schedule(QueuedTask(0, b"", 0, lambda *found: None, (), None))
        clusters.wait_until(lambda: tasks_sent(messages), "it has a task")
        worker = scheduler.workers[0]
        began = worker.last_progress
        clusters.wait_until(
            lambda: worker.last_progress > began + 0.6, "time has passed"
        )
        assert not processes.killed
        with scheduler.condition:
            scheduler.servers[0].is_ready = True
        clusters.wait_until(lambda: processes.killed, "it is ended")
    finally:
        scheduler.close()


def test_it_is_a_positive_number() -> None:
    with pytest.raises(ks.errors.InvalidArgumentError, match="step_timeout_seconds"):
        ks.ParameterServerStrategy(step_timeout_seconds=0)


@pytest.mark.multiprocess
def test_a_closure_that_hangs_counts_once(recovered, tmp_path, monkeypatch) -> None:
    """It hangs after its first update, in the only process that runs it first."""
    scheduler = recovered.cluster.scheduler
    options = dataclasses.replace(scheduler._options, step_timeout_seconds=4.0)
    monkeypatch.setattr(scheduler, "_options", options)
    coordinator = ks.ClusterCoordinator(recovered)
    with recovered.scope():
        total = keras.Variable(0.0, name="total", trainable=False)
    marker = str(tmp_path / "hung")

    def step():
        import os
        import time

        total.assign_add(1.0)
        if not os.path.exists(marker):
            open(marker, "w").close()
            time.sleep(1000)
        total.assign_add(100.0)
        return os.getpid()

    result = coordinator.schedule(step)
    others = [coordinator.schedule(lambda: total.assign_add(10.0)) for _ in range(5)]
    with pytest.warns(UserWarning, match=r"function 'step' \(test_step_timeouts.py:"):
        coordinator.join(clusters.SECONDS)
    assert result.fetch() > 0 and len(coordinator.fetch(others)) == 5
    assert float(total.numpy()) == 151.0
    # Later tests have no timeout, and all processes.
    clusters.wait_until_whole(recovered)
