"""Synchronous training on three nodes of Ray, of which one is killed during `fit`."""

from __future__ import annotations

from pathlib import Path

import keras
import numpy as np
import pytest
from harness import ray_training
from harness.training import ADAM_TOLERANCE

import keras_strategies as ks

pytestmark = [pytest.mark.multiprocess, pytest.mark.nightly]

NODE = {"num_cpus": 1}
full_on_torch = pytest.mark.skipif(
    keras.backend.backend() != "torch", reason="one backend in full"
)


def assert_like_one_device(found) -> None:
    weights, losses = ray_training.on_one_device()
    for own_weights, own_losses in found:
        np.testing.assert_allclose(own_losses, losses, rtol=1e-4)
        for own, expected in zip(own_weights, weights, strict=True):
            np.testing.assert_allclose(own, expected, ADAM_TOLERANCE, ADAM_TOLERANCE)


def test_a_node_is_killed_and_training_resumes_on_another(ray_nodes, tmp_path: Path):
    nodes = ray_nodes(NODE, NODE, NODE)
    resolver = ks.cluster_resolver.RayClusterResolver(nodes.address)
    nodes.kill_when_named(tmp_path / "node-of-1")
    arguments = {"victim": 1, "resumes": True, "resolver": resolver}
    found = resolver.run(
        ray_training.train, (str(tmp_path),), arguments, max_restarts=1
    )
    assert len(nodes.nodes) == 2
    assert_like_one_device(found)


@full_on_torch
def test_a_killed_node_is_an_error_that_names_the_worker(ray_nodes, tmp_path: Path):
    nodes = ray_nodes(NODE, NODE, NODE)
    resolver = ks.cluster_resolver.RayClusterResolver(nodes.address, workers=3)
    nodes.kill_when_named(tmp_path / "node-of-2")
    with pytest.raises(ks.errors.WorkerError, match=r"[Ww]orker 2 .*was lost"):
        resolver.run(ray_training.train, (str(tmp_path), 2))
    # The resources of the others are free again: it can run once more.
    smaller = ks.cluster_resolver.RayClusterResolver(workers=2)
    assert_like_one_device(smaller.run(ray_training.train, (str(tmp_path),)))


@full_on_torch
def test_elastic_workers_continue_and_a_new_one_joins(ray_nodes, tmp_path: Path):
    nodes = ray_nodes(NODE, NODE, NODE)
    resolver = ks.cluster_resolver.RayClusterResolver(nodes.address, workers=3)
    # The chief: its address is that of the group, and another one later.
    nodes.kill_when_named(tmp_path / "node-of-0")
    found = resolver.run(
        ray_training.train,
        (str(tmp_path), 0),
        max_restarts=1,
        elastic=ks.Elastic(min_workers=1),
    )
    # There is no room for another one.
    assert found[0] is None
    assert_like_one_device(found[1:])
