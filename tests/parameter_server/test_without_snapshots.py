"""What there is to say when a server is lost for good.

The last test of this room, by its name: it ends the cluster that others share.
"""

from __future__ import annotations

import keras
import numpy as np
import psutil
import pytest

import keras_strategies as ks
from parameter_server import clusters

pytestmark = pytest.mark.multiprocess


def test_a_server_without_snapshots_is_missed_loudly(synchronous) -> None:
    dispatcher = synchronous.cluster.dispatcher
    states = [*dispatcher.workers.values(), *dispatcher.servers.values()]
    processes = [psutil.Process(state.pid) for state in states]
    processes.append(psutil.Process(synchronous.cluster._manager._process.pid))
    coordinator = ks.ClusterCoordinator(synchronous)
    with synchronous.scope():
        total = keras.Variable(np.zeros(3), name="total")

    clusters.kill(synchronous, "ps", 0)
    clusters.wait_until(lambda: dispatcher.fatal is not None, "it is noticed")
    with pytest.raises(ks.errors.ServerLostError, match="snapshot_seconds"):
        coordinator.schedule(lambda: total.numpy())
    with pytest.raises(ks.errors.ServerLostError, match="Parameter server 0 died"):
        coordinator.join()

    synchronous.close()
    assert not dispatcher._thread.is_alive()
    with pytest.raises(ks.errors.WorkerError, match="has been closed"):
        total.numpy()
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert not alive
