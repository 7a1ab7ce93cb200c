"""Tables that are larger than what any process may hold."""

from __future__ import annotations

import contextlib
import os
import resource

import keras
import numpy as np
import pytest

import keras_strategies as ks
from parameter_server import clusters

pytestmark = [
    pytest.mark.one_backend,
    pytest.mark.multiprocess,
]

COLUMNS = 64
ROWS = (192 << 20) // (4 * COLUMNS)


@contextlib.contextmanager
def limited(pids, nbytes: int):
    """Lets processes have so much more memory than they have now."""

    def used(pid: int) -> int:
        with open(f"/proc/{pid}/status") as file:
            (line,) = (line for line in file if line.startswith("VmData:"))
        return int(line.split()[1]) * 1024

    before = {pid: resource.prlimit(pid, resource.RLIMIT_DATA) for pid in pids}
    for pid, (_, hard) in before.items():
        resource.prlimit(pid, resource.RLIMIT_DATA, (used(pid) + nbytes, hard))
    try:
        yield
    finally:
        for pid, limits in before.items():
            resource.prlimit(pid, resource.RLIMIT_DATA, limits)


def build(rows: int):
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((2,), dtype="int32"),
            keras.layers.Embedding(rows, COLUMNS),
            keras.layers.Flatten(),
            keras.layers.Dense(1),
        ]
    )
    model.compile(keras.optimizers.Adagrad(0.1), "mse")
    model.optimizer.build(model.trainable_variables)
    return model


def test_one_server_with_much_more_than_its_share_is_told_of(synchronous) -> None:
    with clusters.parts(synchronous, 1), synchronous.scope():
        model = build(ROWS // 4)
    synchronous.registry._has_warned = False
    with pytest.warns(UserWarning, match="times its share of 2 servers") as warned:
        model.predict_on_batch(np.zeros((2, 2), "int32"))
    assert "/embeddings'" in str(warned[0].message)
    assert "MinSizePartitioner(max_shards=2)" in str(warned[0].message)
    status = ks.ClusterCoordinator(synchronous).status()
    assert status.held_bytes[0] > 2 * status.held_bytes[1]
    assert "MiB" in str(status)


def test_a_table_larger_than_every_process_trains(synchronous) -> None:
    """The table and its slot have 384 MiB; each process may have 320 more."""
    scheduler = synchronous.cluster.scheduler
    servers = [server.pid for server in scheduler.servers.values()]
    workers = [worker.pid for worker in scheduler.workers.values()]
    ids = np.random.default_rng(0).choice(ROWS, (64, 2), replace=False)
    # Programs are compiled before memory is short.
    with synchronous.scope():
        small = build(1000)
    small.fit(ids % 1000, np.ones((64, 1)), batch_size=16, verbose=0)

    with limited([os.getpid(), *workers, *servers], 320 << 20):
        with synchronous.scope():
            model = build(ROWS)
        table = model.layers[0].embeddings
        first = np.asarray(table[ids.reshape(-1)])
        assert 0.02 < first.std() < 0.04  # Uniform between -0.05 and 0.05.
        history = model.fit(
            ids, np.ones((64, 1)), batch_size=16, epochs=5, verbose=0
        ).history
        last = np.asarray(table[ids.reshape(-1)])
        with (
            pytest.raises(MemoryError),
            clusters.parts(synchronous, 1),
            synchronous.scope(),
        ):
            build(ROWS)

    assert history["loss"][-1] < 0.5 * history["loss"][0]
    assert np.all(np.any(last != first, axis=1))
    untouched = np.setdiff1d(np.arange(5000), ids)
    slot = model.optimizer.variables[2]
    assert slot.shape == table.shape
    np.testing.assert_array_equal(np.asarray(slot[untouched]), np.float32(0.1))
