"""`fit` in the workers of Ray Train's trainers, of which one restarts them."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from harness.training import ADAM_TOLERANCE
from ray_engine import ray_training

pytestmark = [pytest.mark.multiprocess, pytest.mark.nightly]

NODES, NODE = 3, {"num_cpus": 1, "num_gpus": 1}

BACKEND = keras.backend.backend()
#: By backend: trainers that set up its cluster, another one, or none.
TRAINERS = {
    "jax": ["v2.jax.JaxTrainer", "torch.TorchTrainer"],
    "torch": ["torch.TorchTrainer", "tensorflow.TensorflowTrainer"],
    "tensorflow": ["tensorflow.TensorflowTrainer"],
}[BACKEND]


def train(
    name: str,
    folder: Path,
    given: bool = False,
    started: str = "",
    victim: int | None = None,
    **scaling: Any,
) -> None:
    """Trains in a trainer, and compares weights and losses with one device.

    Args:
        name: str, the trainer.
        folder: for its files.
        given: bool, whether the strategy is passed a resolver.
        started: str, the framework of the cluster that the trainer has started.
        victim: int, the worker on the node that is killed.
        scaling: arguments of `ScalingConfig`.
    """
    from ray.train import FailureConfig, RunConfig, ScalingConfig

    module, _, trainer = name.rpartition(".")
    getattr(importlib.import_module(f"ray.train.{module}"), trainer)(
        ray_training.train_in_trainer,
        train_loop_config={
            "folder": str(folder),
            "given": given,
            "started": started,
            "victim": victim,
        },
        scaling_config=ScalingConfig(num_workers=2, **scaling),
        run_config=RunConfig(
            storage_path=str(folder / "storage"),
            # The loss may be noticed again in the next start.
            failure_config=FailureConfig(0 if victim is None else 3),
            worker_runtime_env={"env_vars": {"JAX_PLATFORMS": "cpu"}},
        ),
    ).fit()
    weights, losses = ray_training.on_one_device()
    for rank in range(2):
        found = np.load(folder / f"{BACKEND}-{rank}.npz")
        np.testing.assert_allclose(found["losses"], losses, rtol=1e-4)
        for i, expected in enumerate(weights):
            np.testing.assert_allclose(
                found[f"weight{i}"], expected, ADAM_TOLERANCE, ADAM_TOLERANCE
            )


@pytest.mark.parametrize("name", TRAINERS)
def test_fit_in_a_trainer_is_as_on_one_device(ray_nodes, name: str, tmp_path: Path):
    started = "torch" if name == "torch.TorchTrainer" else ""
    train(name, tmp_path, name == TRAINERS[0], started)


@pytest.mark.skipif(BACKEND != "jax", reason="JAX only")
def test_a_trainer_has_started_jaxs_cluster(ray_nodes, tmp_path: Path):
    # With GPUs, also where JAX uses CPUs.
    train("v2.jax.JaxTrainer", tmp_path, started="jax", use_gpu=True)


@pytest.mark.skipif(BACKEND != "torch", reason="one backend in full")
def test_a_trainer_restarts_workers_of_which_a_node_is_killed(
    ray_nodes, tmp_path: Path
):
    with ray_nodes.killed_when_named(tmp_path / "node-of-1"):
        train("torch.TorchTrainer", tmp_path, victim=1)
    assert len(ray_nodes.nodes) == 2
