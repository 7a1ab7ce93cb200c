"""Parameter servers on nodes of Ray, of which one is killed during `fit`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from harness.training import ADAM_TOLERANCE
from parameter_server import clusters
from ray_engine import ray_training

import keras_strategies as ks

pytestmark = [pytest.mark.multiprocess, pytest.mark.nightly]

NODES, NODE = 3, {"num_cpus": 1}

full_on_torch = pytest.mark.skipif(
    keras.backend.backend() != "torch", reason="one backend in full"
)


@contextmanager
def training(workers: int = 1, **options: Any) -> Iterator[Any]:
    """A strategy with a server and workers, of which one has to be there; a model."""
    resolver = ks.cluster_resolver.RayClusterResolver(
        workers=workers, ps=1, min_workers=1
    )
    with ks.ParameterServerStrategy(resolver, silence_seconds=10, **options) as made:
        with made.scope():
            model = ray_training.model()
        yield made, model


def node_of(strategy: Any, task: str) -> str:
    """The node of a task's latest process."""
    from ray._private import state

    running = strategy.cluster._processes._actors._running
    actor = [actor for each, actor in running.items() if str(each) == task][-1]
    return state.actors(actor._actor_id.hex())["Address"]["NodeID"]


class Kill(keras.callbacks.Callback):
    """Kills the node of a task in a step of the first epoch."""

    def __init__(self, nodes: Any, strategy: Any, task: str):
        super().__init__()
        self._nodes, self._strategy, self._task = nodes, strategy, task
        self.killed = ""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == 2 and not self.killed:
            self.killed = node_of(self._strategy, self._task)
            self._nodes.kill(self.killed)
            # Some milliseconds later the remaining steps would be done.
            job, index = self._task.split()
            scheduler = self._strategy.cluster.scheduler
            tasks = scheduler.workers if job == "worker" else scheduler.servers
            clusters.wait_until(lambda: tasks[int(index)].deaths > 0, "it is noticed")


@pytest.mark.parametrize(
    "task", ["worker 0", pytest.param("ps 0", marks=full_on_torch)]
)
def test_a_node_is_killed_during_fit(ray_nodes, task: str, tmp_path: Path):
    options = {"snapshot_seconds": 0.2, "snapshot_folder": str(tmp_path)}
    with training(max_staleness=0, **options) as (strategy, model):
        before = model.get_weights()
        kill = Kill(ray_nodes, strategy, task)
        weights, losses = ray_training.fit(model, [kill])
        clusters.wait_until_whole(strategy)
        assert node_of(strategy, task) != kill.killed
        status = ks.ClusterCoordinator(strategy).status()
        (row,) = [row for row in status.rows if row[0] == task]
        # Another process may be placed on the node before Ray knows that it is lost.
        assert row[1] == "alive" and row[6] in ("1", "2")
        steps = int(keras.ops.convert_to_numpy(model.optimizer.iterations))
    if task == "worker 0":
        # Nothing is lost, and no step counts twice.
        assert steps == ray_training.STEPS
        expected, expected_losses = ray_training.on_one_device()
        np.testing.assert_allclose(losses, expected_losses, rtol=1e-4)
        for own, other in zip(weights, expected, strict=True):
            np.testing.assert_allclose(own, other, ADAM_TOLERANCE, ADAM_TOLERANCE)
    else:
        # Updates since the last snapshot are lost, and no step counts twice.
        assert ray_training.STEPS - 3 <= steps <= ray_training.STEPS
        assert all(
            (own != other).any() for own, other in zip(weights, before, strict=True)
        )


def number_of_worker() -> int | None:
    time.sleep(0.05)
    return ks.get_current_worker_index()


@full_on_torch
def test_a_worker_joins_when_the_cluster_grows(ray_nodes):
    # A server and two workers have room.
    with training(workers=3) as (strategy, model):
        coordinator = ks.ClusterCoordinator(strategy)

        def has(count: int) -> None:
            clusters.wait_until(
                lambda: coordinator.status().workers_alive == count,
                f"{count} workers are alive",
            )

        has(2)
        with ray_nodes.added():
            has(3)
            ray_training.fit(model, [])
            steps = int(keras.ops.convert_to_numpy(model.optimizer.iterations))
            assert steps == ray_training.STEPS
            values = [coordinator.schedule(number_of_worker) for _ in range(60)]
            assert {value.fetch() for value in values} == {0, 1, 2}
            nodes = {node_of(strategy, f"worker {i}") for i in range(3)}
            assert len(nodes) == 3
