"""Script: a coordinator with a cluster as users start it.

    python killed_coordinator.py FOLDER

Its worker dies, then its server, and after two epochs it is killed itself. It leaves a
backup in FOLDER/backup, and the numbers of its processes.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import keras
import numpy as np

import keras_strategies as ks
from keras_strategies.experimental import partitioners
from parameter_server import clusters
from parameter_server.test_checkpoints import OPTIONS, build


def imported() -> tuple[bool, bool]:
    import importlib.util
    import sys

    return "sklearn" in sys.modules, importlib.util.find_spec("sklearn") is not None


def replaces_a_worker(strategy, coordinator) -> None:
    with strategy.scope():
        total = keras.Variable(np.zeros(3), name="total")
    # Workers import no more than they need; functions of users may.
    found = coordinator.schedule(imported).fetch(clusters.SECONDS)
    assert found == (False, True), found
    clusters.kill(strategy, "worker", 0)
    coordinator.schedule(lambda: total.assign_add(np.ones(3)))
    coordinator.join(clusters.SECONDS)
    assert total.numpy().tolist() == [1.0, 1.0, 1.0]
    assert strategy.cluster.scheduler.workers[0].deaths == 1


def processes(strategy) -> list[int]:
    scheduler = strategy.cluster.scheduler
    states = [*scheduler.workers.values(), *scheduler.servers.values()]
    return [state.pid for state in states]


def main(folder: Path) -> None:
    # Workers are to leave out what they do not need, without the tests' help.
    sys.path[:] = [path for path in sys.path if not path.endswith("lean")]
    with clusters.start(
        workers=1,
        ps=1,
        max_staleness=0,
        snapshot_seconds=60.0,
        variable_partitioner=partitioners.FixedShardsPartitioner(2),
    ) as strategy:
        coordinator = ks.ClusterCoordinator(strategy)
        replaces_a_worker(strategy, coordinator)
        with strategy.scope():
            model = build()

        def die(epoch, logs) -> None:
            if epoch == 1:
                strategy.cluster.servers.request(0, "snapshot")
                clusters.kill(strategy, "ps", 0)
            if epoch == 2:
                assert strategy.cluster.scheduler.servers[0].deaths == 1
                assert coordinator.status().bytes_per_step > 1000
                (folder / "pids").write_text(" ".join(map(str, processes(strategy))))
                os.kill(os.getpid(), signal.SIGKILL)

        callbacks = [
            keras.callbacks.BackupAndRestore(folder / "backup"),
            keras.callbacks.LambdaCallback(on_epoch_begin=die),
        ]
        x, y = clusters.clicks()
        model.fit(x, y, epochs=3, callbacks=callbacks, **OPTIONS)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
