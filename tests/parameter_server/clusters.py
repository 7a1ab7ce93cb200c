"""Clusters for tests, and what is done to them."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

import keras_strategies as ks
from keras_strategies.experimental import partitioners
from keras_strategies.parameter_server.coordinator.cluster_options import ClusterOptions
from keras_strategies.parameter_server.coordinator.cluster_processes import EndCause
from keras_strategies.parameter_server.coordinator.cluster_state import WorkerState
from keras_strategies.parameter_server.coordinator.process_supervisor import (
    ProcessSupervisor,
)
from keras_strategies.parameter_server.variables.shard_placement import (
    RoundRobinPlacement,
)
from keras_strategies.parameter_server.wire.server_addresses import ServerAddresses
from keras_strategies.processes.local_cluster import LocalTask

SECONDS = 60.0
#: Between the snapshots of servers that have them.
SNAPSHOT_SECONDS = 0.5


def start(workers: int, ps: int, **options):
    """A strategy with a local cluster, quick to notice what is dead."""
    resolver = ks.cluster_resolver.LocalClusterResolver(workers, ps)
    return ks.ParameterServerStrategy(resolver, **options)


def start_synchronous():
    """A cluster with a worker that computes what one device computes.

    One step after the other, variables in two parts on two servers.
    """
    return start(
        workers=1,
        ps=2,
        max_staleness=0,
        variable_partitioner=partitioners.FixedShardsPartitioner(2),
    )


class RecordedProcesses:
    """Stands in for `ClusterProcesses`: starts nothing, ends are given by a test."""

    def __init__(self) -> None:
        self.started: list[LocalTask] = []
        self.killed: list[LocalTask] = []
        self.ends: list[tuple[LocalTask, EndCause]] = []

    def start(self, task: LocalTask) -> None:
        self.started.append(task)

    def kill(self, task: LocalTask) -> None:
        self.killed.append(task)

    def ended(self) -> list[tuple[LocalTask, EndCause]]:
        found, self.ends = self.ends, []
        return found


class RecordedSupervisor(ProcessSupervisor):
    """A supervisor of processes that a test reports and ends.

    Args:
        workers: int, their number.
        servers: int, their number.
        can_restore: bool, whether servers have snapshots.
    """

    def __init__(self, workers: int, servers: int, can_restore: bool = False):
        self.processes = RecordedProcesses()
        #: Messages with their receivers.
        self.sent: list[tuple[bytes, Any]] = []
        #: Indices of workers, and reasons.
        self.lost: list[tuple[int, str]] = []
        self.failures: list[BaseException] = []
        self.damage: list[str] = []
        self.snapshot_problems: list[str | None] = []
        super().__init__(
            ClusterOptions(workers, servers, silence_seconds=8.0),
            self.processes,
            can_restore=can_restore,
            name="me",
            addresses=ServerAddresses([""] * servers),
            observer=self,
        )

    def send(self, receiver: bytes, message: Any) -> None:
        self.sent.append((receiver, message))

    def process_registered(self) -> None:
        pass

    def worker_lost(self, worker: WorkerState, cause: EndCause) -> None:
        self.lost.append((worker.index, cause.reason))

    def server_damaged(self, damage: str) -> None:
        self.damage.append(damage)

    def snapshots_reported(self, problem: str | None) -> None:
        self.snapshot_problems.append(problem)

    def failed(self, error: BaseException) -> None:
        self.failures.append(error)


def wait_until(holds: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < until, f"waited in vain until {what}"
        time.sleep(0.02)


def is_whole(strategy) -> bool:
    """Whether every worker and server of a strategy is alive."""
    scheduler = strategy.cluster.scheduler
    with scheduler.condition:
        return all(w.is_alive for w in scheduler.workers.values()) and all(
            s.is_ready for s in scheduler.servers.values()
        )


def wait_until_whole(strategy) -> None:
    wait_until(lambda: is_whole(strategy), "all processes are back")


def assert_nothing_broke(strategy) -> None:
    """No error is left that a test should have taken."""
    assert strategy.cluster.scheduler.tasks.fatal is None
    assert strategy.cluster.scheduler.tasks.error is None


@contextlib.contextmanager
def parts(strategy, count):
    """Cuts variables that are made in the block into another number of parts."""
    registry = strategy.registry
    partitioner = partitioners.FixedShardsPartitioner(count)
    servers = len(strategy.cluster.scheduler.servers)
    before, registry._places = (
        registry._places,
        RoundRobinPlacement(servers, partitioner),
    )
    try:
        yield
    finally:
        registry._places = before


def kill(strategy, kind: str, index: int, number: int = signal.SIGKILL) -> int:
    """Sends a signal to a worker ("worker") or server ("ps"); its process id."""
    scheduler = strategy.cluster.scheduler
    states = scheduler.workers if kind == "worker" else scheduler.servers
    pid = states[index].pid
    os.kill(pid, number)
    return pid


def clicks(rows: int = 96, ids: int = 40, batch: int = 8):
    """Rows with ids that are different within each batch."""
    random = np.random.default_rng(0)
    chosen = [random.permutation(ids)[: 3 * batch] for _ in range(rows // batch)]
    codes = np.concatenate(chosen).reshape(rows, 3).astype("int32")
    dense = random.normal(size=(rows, 4)).astype("float32")
    y = (dense.sum(1, keepdims=True) + codes[:, :1] % 5).astype("float32")
    return [dense, codes], y


def two_inputs(optimizer, ids: int = 40):
    """Embedding, dense layers, batch normalization and dropout, seeded."""
    keras.utils.set_random_seed(1)
    dense = keras.Input((4,))
    codes = keras.Input((3,), dtype="int32")
    rows = keras.layers.Flatten()(keras.layers.Embedding(ids, 4)(codes))
    x = keras.layers.Dense(8, activation="relu")(dense)
    x = keras.layers.Concatenate()([x, rows])
    x = keras.layers.BatchNormalization()(x)
    x = keras.layers.Dropout(0.2, seed=3)(x)
    model = keras.Model([dense, codes], keras.layers.Dense(1)(x))
    model.compile(optimizer, "mse", metrics=["mae"])
    return model


def values(variables) -> list[np.ndarray]:
    return [
        np.asarray(keras.ops.convert_to_numpy(v.value), "float64") for v in variables
    ]
