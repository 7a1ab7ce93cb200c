"""A cluster as users start it: its processes, and their ends.

Processes take seconds to start, so that one cluster does everything here; its normal
end is in `test_entry_points.py`. What all clusters have is tested with forks.
"""

from __future__ import annotations

import signal
from pathlib import Path

import keras
import numpy as np
import psutil
import pytest

from parameter_server import clusters
from parameter_server.test_checkpoints import OPTIONS, build

pytestmark = pytest.mark.multiprocess

SCRIPT = Path(__file__).with_name("killed_coordinator.py")


@pytest.mark.one_backend("jax")
@pytest.mark.slow(seconds=17)
def test_what_dies_is_replaced_and_a_killed_coordinator_leaves_nothing(
    forker, synchronous, tmp_path
) -> None:
    """Another coordinator goes on at its backup, and ends where one device does."""
    process = forker.start(tmp_path / "log", str(SCRIPT), str(tmp_path))
    assert process.wait(180)[0] == -signal.SIGKILL, process.text()
    pids = [int(word) for word in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 2
    clusters.wait_until(
        lambda: not any(map(psutil.pid_exists, pids)), "its processes are gone"
    )
    x, y = clusters.clicks()
    alone = build()
    losses = alone.fit(x, y, epochs=3, **OPTIONS).history["loss"]
    with synchronous.scope():
        model = build()
    backup = keras.callbacks.BackupAndRestore(tmp_path / "backup")
    history = model.fit(x, y, epochs=3, callbacks=[backup], **OPTIONS)
    assert history.epoch == [2]
    np.testing.assert_allclose(history.history["loss"], losses[2:], rtol=1e-4)
    weights = clusters.values(alone.weights)
    for found, expected in zip(clusters.values(model.weights), weights, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
