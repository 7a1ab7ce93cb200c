"""Synchronous training on three nodes of Ray, of which one is killed during `fit`."""

from __future__ import annotations

import threading
from pathlib import Path

import keras
import numpy as np
import pytest
from harness.training import ADAM_TOLERANCE
from ray_engine import ray_training

import keras_strategies as ks

pytestmark = [pytest.mark.multiprocess, pytest.mark.nightly]

NODES, NODE = 3, {"num_cpus": 1}

full_on_torch = pytest.mark.skipif(
    keras.backend.backend() != "torch", reason="one backend in full"
)
#: Runs that take longer are ended.
SECONDS = 300.0


def assert_like_one_device(found) -> None:
    weights, losses = ray_training.on_one_device()
    for own_weights, own_losses in found:
        np.testing.assert_allclose(own_losses, losses, rtol=1e-4)
        for own, expected in zip(own_weights, weights, strict=True):
            np.testing.assert_allclose(own, expected, ADAM_TOLERANCE, ADAM_TOLERANCE)


def test_a_node_is_killed_and_training_resumes_on_another(ray_nodes, tmp_path: Path):
    resolver = ks.cluster_resolver.RayClusterResolver(ray_nodes.address)
    arguments = {"victim": 1, "resumes": True, "resolver": resolver}
    with ray_nodes.killed_when_named(tmp_path / "node-of-1"):
        found = resolver.run(
            ray_training.train,
            (str(tmp_path),),
            arguments,
            max_restarts=1,
            timeout_seconds=SECONDS,
        )
    assert len(ray_nodes.nodes) == 2
    assert_like_one_device(found)


@full_on_torch
def test_a_killed_node_is_an_error_that_names_the_worker(ray_nodes, tmp_path: Path):
    resolver = ks.cluster_resolver.RayClusterResolver(workers=3)
    with (
        ray_nodes.killed_when_named(tmp_path / "node-of-2"),
        pytest.raises(ks.errors.WorkerError, match=r"[Ww]orker 2 .*was lost"),
    ):
        resolver.run(ray_training.train, (str(tmp_path), 2), timeout_seconds=SECONDS)
    # The resources of the others are free again: it can run once more.
    smaller = ks.cluster_resolver.RayClusterResolver(workers=2)
    assert_like_one_device(
        smaller.run(ray_training.train, (str(tmp_path),), timeout_seconds=SECONDS)
    )


@full_on_torch
def test_elastic_workers_continue_without_room_for_another(ray_nodes, tmp_path: Path):
    resolver = ks.cluster_resolver.RayClusterResolver(workers=3)
    # The chief: its address is that of the group, and another one later.
    with ray_nodes.killed_when_named(tmp_path / "node-of-0"):
        found = resolver.run(
            ray_training.train,
            (str(tmp_path), 0),
            max_restarts=1,
            elastic=ks.Elastic(min_workers=1),
            timeout_seconds=SECONDS,
        )
    assert found[0] is None
    assert_like_one_device(found[1:])


def test_an_elastic_worker_joins_when_there_is_room(ray_nodes, tmp_path: Path):
    resolver = ks.cluster_resolver.RayClusterResolver(workers=3)
    found = []

    def run() -> None:
        found.extend(
            resolver.run(
                ray_training.train,
                (str(tmp_path), 2),
                {"joins": True},
                max_restarts=1,
                elastic=ks.Elastic(min_workers=1),
                timeout_seconds=SECONDS,
            )
        )

    with ray_nodes.killed_when_named(tmp_path / "node-of-2"):
        thread = threading.Thread(target=run)
        thread.start()
        while thread.is_alive() and not (tmp_path / "waits").exists():
            thread.join(0.1)
    with ray_nodes.added():
        thread.join()
    # The third one is another process of worker 2.
    assert len(found) == 3
    assert_like_one_device(found)
