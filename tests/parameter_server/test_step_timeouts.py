"""`step_timeout_seconds`: steps that hang while their process lives."""

from __future__ import annotations

import dataclasses

import keras
import pytest

import keras_strategies as ks
from parameter_server import clusters

pytestmark = pytest.mark.one_backend


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
