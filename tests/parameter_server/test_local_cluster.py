"""A cluster as users start it: Ray, its processes, and what is left of them."""

from __future__ import annotations

import keras
import numpy as np
import psutil
import pytest

import keras_strategies as ks
from parameter_server import clusters

pytestmark = pytest.mark.multiprocess


def imported() -> tuple[bool, bool]:
    import importlib.util
    import sys

    return "sklearn" in sys.modules, importlib.util.find_spec("sklearn") is not None


def test_ray_starts_replaces_and_ends_processes(by_ray) -> None:
    """One cluster, because it takes seconds to start: its life from start to end."""
    with clusters.start(workers=1, ps=2) as strategy:
        dispatcher = strategy.cluster.dispatcher
        coordinator = ks.ClusterCoordinator(strategy)
        with strategy.scope():
            total = keras.Variable(np.zeros(3), name="total")
        # Workers import no more than they need; functions of users may.
        found = coordinator.schedule(imported).fetch(clusters.SECONDS)
        assert found == (False, True)

        clusters.kill(strategy, "worker", 0)
        coordinator.schedule(lambda: total.assign_add(np.ones(3)))
        coordinator.join(clusters.SECONDS)
        assert total.numpy().tolist() == [1.0, 1.0, 1.0]
        assert dispatcher.workers[0].deaths == 1

        states = [*dispatcher.workers.values(), *dispatcher.servers.values()]
        processes = [psutil.Process(state.pid) for state in states]
        processes.append(psutil.Process(strategy.cluster._manager._process.pid))
        clusters.kill(strategy, "ps", 0)
        clusters.wait_until(lambda: dispatcher.fatal is not None, "it is noticed")
        with pytest.raises(ks.errors.ServerLostError, match="snapshot_seconds"):
            coordinator.schedule(lambda: total.numpy())
        with pytest.raises(ks.errors.ServerLostError, match="Parameter server 0 died"):
            coordinator.join()

    assert not dispatcher._thread.is_alive()
    with pytest.raises(ks.errors.WorkerError, match="has been closed"):
        total.numpy()
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert not alive
