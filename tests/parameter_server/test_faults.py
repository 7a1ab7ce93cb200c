"""Processes that are killed or stopped, and what is left of them."""

from __future__ import annotations

import signal
import threading

import keras
import numpy as np
import psutil
import pytest

import keras_strategies as ks
from parameter_server import clusters

pytestmark = pytest.mark.multiprocess


def test_workers_and_servers_die_and_every_step_counts_once(tmp_path) -> None:
    with clusters.start(
        ps=1, snapshot_seconds=0.2, snapshot_folder=str(tmp_path), silence_seconds=4.0
    ) as strategy:
        children = psutil.Process().children(recursive=True)
        coordinator = ks.ClusterCoordinator(strategy)
        with strategy.scope():
            total = keras.Variable(0.0, name="total", trainable=False)

        def step(x):
            import time

            total.assign_add(x)
            time.sleep(0.02)
            return x

        # A worker that is killed while it works.
        results = [coordinator.schedule(step, args=(1.0,)) for _ in range(40)]
        clusters.wait_until(lambda: results[3]._known.is_set(), "steps are done")
        clusters.kill(strategy, "worker", 0)
        coordinator.join(clusters.SECONDS)
        assert float(total.numpy()) == 40.0
        assert coordinator.fetch(results) == [1.0] * 40

        # A worker that is stopped, and answers nobody.
        dispatcher = strategy.cluster.dispatcher
        clusters.wait_until(
            lambda: all(w.is_alive for w in dispatcher.workers.values()), "both live"
        )
        clusters.kill(strategy, "worker", 1, signal.SIGSTOP)
        for _ in range(20):
            coordinator.schedule(step, args=(1.0,))
        coordinator.join(clusters.SECONDS)
        assert float(total.numpy()) == 60.0
        assert dispatcher.workers[1].deaths == 1

        # The server, after a snapshot.
        strategy.cluster.servers.ask(0, "snapshot")
        clusters.kill(strategy, "ps", 0)
        for _ in range(10):
            coordinator.schedule(step, args=(1.0,))
        coordinator.join(clusters.SECONDS)
        assert float(total.numpy()) == 70.0
        assert dispatcher.servers[0].deaths == 1

        # A worker more.
        index = dispatcher.add_worker()
        clusters.wait_until(lambda: dispatcher.workers[index].is_alive, "it joined")
        children += psutil.Process().children(recursive=True)
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive
    assert list(tmp_path.iterdir()) == [tmp_path / "ps-0.snapshot"]


def test_a_server_without_snapshots_is_missed_loudly() -> None:
    with clusters.start(workers=1, ps=1) as strategy:
        coordinator = ks.ClusterCoordinator(strategy)
        with strategy.scope():
            total = keras.Variable(np.zeros(3), name="total")

        clusters.kill(strategy, "ps", 0)
        clusters.wait_until(
            lambda: strategy.cluster.dispatcher.fatal is not None, "it is noticed"
        )
        with pytest.raises(ks.errors.ServerLostError, match="snapshot_seconds"):
            coordinator.schedule(lambda: total.numpy())
        with pytest.raises(ks.errors.ServerLostError, match="Parameter server 0 died"):
            coordinator.join()
    names = {thread.name for thread in threading.enumerate()}
    assert "coordinator" not in names
