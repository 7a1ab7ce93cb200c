"""Parameter servers on nodes of Ray, of which one is killed during `fit`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from harness import ray_training
from harness.training import ADAM_TOLERANCE
from parameter_server import clusters

import keras_strategies as ks

pytestmark = [pytest.mark.multiprocess, pytest.mark.nightly]

NODE = {"num_cpus": 1}
full_on_torch = pytest.mark.skipif(
    keras.backend.backend() != "torch", reason="one backend in full"
)


@contextmanager
def training(
    nodes: Any, workers: int = 1, ps: int = 1, **options: Any
) -> Iterator[Any]:
    """A strategy on a Ray cluster, and a model."""
    resolver = ks.cluster_resolver.RayClusterResolver(
        nodes.address,
        workers,
        ps=1,
        min_workers=1,
        resources_per_worker={"CPU": 1} | options.pop("more", {}),
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
    nodes = ray_nodes(NODE, NODE, NODE)
    options = {"snapshot_seconds": 0.2, "snapshot_folder": str(tmp_path)}
    with training(nodes, max_staleness=0, **options) as (strategy, model):
        before = model.get_weights()
        kill = Kill(nodes, strategy, task)
        weights, losses = ray_training.fit(model, [kill])
        clusters.wait_until_whole(strategy)
        assert node_of(strategy, task) != kill.killed
        status = ks.ClusterCoordinator(strategy).status()
        (row,) = [row for row in status.rows if row[0] == task]
        assert row[1] == "alive" and row[6] == "1"
        steps = int(keras.ops.convert_to_numpy(model.optimizer.iterations))
    total = ray_training.EPOCHS * ray_training.ROWS // ray_training.BATCH
    if task == "worker 0":
        # Nothing is lost, and no step counts twice.
        assert steps == total
        expected, expected_losses = ray_training.on_one_device()
        np.testing.assert_allclose(losses, expected_losses, rtol=1e-4)
        for own, other in zip(weights, expected, strict=True):
            np.testing.assert_allclose(own, other, ADAM_TOLERANCE, ADAM_TOLERANCE)
    else:
        assert total - 3 <= steps <= total
        assert all(
            (own != other).any() for own, other in zip(weights, before, strict=True)
        )


@full_on_torch
def test_a_worker_joins_when_the_cluster_grows(ray_nodes):
    # A worker that computes on a GPU is one on a node that has one, by name.
    nodes = ray_nodes(NODE, {"num_cpus": 1, "num_gpus": 1})
    with training(nodes, workers=2, more={"GPU": 1}) as (strategy, model):
        coordinator = ks.ClusterCoordinator(strategy)
        assert coordinator.status().workers_alive == 1
        nodes.add(num_cpus=1, num_gpus=1)
        clusters.wait_until(
            lambda: coordinator.status().workers_alive == 2, "a worker has joined"
        )
        ray_training.fit(model, [])

        def visible() -> tuple[int | None, str]:
            import os

            return ks.get_current_worker_index(), os.environ["CUDA_VISIBLE_DEVICES"]

        found = {coordinator.schedule(visible).fetch() for _ in range(20)}
        assert {gpu for _, gpu in found} == {"0"}
        assert node_of(strategy, "worker 0") != node_of(strategy, "worker 1")


@full_on_torch
def test_snapshots_need_a_folder_that_is_shared():
    resolver = ks.cluster_resolver.RayClusterResolver(ps=1)
    with pytest.raises(ValueError, match="needs `snapshot_folder` on Ray"):
        ks.ParameterServerStrategy(resolver, snapshot_seconds=1.0)


@full_on_torch
def test_a_cluster_without_servers_is_an_error():
    with pytest.raises(ValueError, match="has no 'ps'"):
        ks.ParameterServerStrategy(ks.cluster_resolver.RayClusterResolver())
