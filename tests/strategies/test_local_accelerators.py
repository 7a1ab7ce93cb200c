"""Several processes on a machine: each has the accelerator of its number there."""

from __future__ import annotations

import json
import re
from typing import Any

import keras
import pytest
from harness.launcher_variables import SLURM

import keras_strategies as ks
from keras_strategies.cluster.environment import RANK_VARIABLES, find_local_number
from keras_strategies.cluster.resolvers.environment.process_numbers import RankAndSize
from keras_strategies.devices import Device
from keras_strategies.engines import get_engine
from keras_strategies.errors import ClusterError
from keras_strategies.strategies import device_selection
from keras_strategies.strategies.device_selection import (
    default_devices,
    own_accelerator,
)

pytestmark = pytest.mark.one_backend

BACKEND = keras.backend.backend()
GPUS = [Device("gpu", i) for i in range(4)]
TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}
_NUMBERS = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
OPEN_MPI = {f"OMPI_COMM_WORLD_{n}": v for n, v in zip(_NUMBERS, "6824", strict=True)}
MVAPICH = {f"MV2_COMM_WORLD_{n}": v for n, v in zip(_NUMBERS, "3834", strict=True)}
MPICH = {"PMI_RANK": "4", "PMI_SIZE": "8", "MPI_LOCALRANKID": "0"}
CRAY = {"PMI_RANK": "4", "PMI_SIZE": "8", "PMI_LOCAL_RANK": "2"}
TASK = {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}


@pytest.fixture(autouse=True)
def process(monkeypatch):
    """A process that no launcher has started, and that has no strategy yet."""
    for name in (*RANK_VARIABLES, *SLURM, "TF_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(device_selection, "_kept", {})


def set_variables(monkeypatch, variables):
    for name, text in variables.items():
        monkeypatch.setenv(name, text)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, None),
        (TORCHRUN, (1, 4)),
        (TORCHRUN | {"WORLD_SIZE": "1", "RANK": "0"}, None),
        (OPEN_MPI, (2, 4)),
        (MVAPICH, (3, 4)),
        (MPICH, (0, 0)),
        (MPICH | {"MPI_LOCALNRANKS": "2"}, (0, 2)),
        (CRAY | {"PMI_LOCAL_SIZE": "4"}, (2, 4)),
        (SLURM | {"CUDA_VISIBLE_DEVICES": ""}, (1, 2)),
        # The resolver divides these between the tasks.
        (SLURM, None),
        # The launcher of `TF_CONFIG` is that of the processes.
        (OPEN_MPI | {"TF_CONFIG": json.dumps(TASK)}, (2, 4)),
        # Left over from a launcher of another process.
        ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, None),
        (TORCHRUN | OPEN_MPI, (1, 4)),
    ],
)
def test_the_number_is_that_of_the_launcher(monkeypatch, variables, expected):
    set_variables(monkeypatch, variables)
    found = find_local_number()
    assert (found and (found.rank, found.size)) == expected


def test_a_number_that_is_none_is_an_error(monkeypatch):
    set_variables(monkeypatch, TORCHRUN | {"LOCAL_RANK": "one"})
    with pytest.raises(ClusterError, match="LOCAL_RANK is 'one', not a number"):
        find_local_number()


@pytest.mark.parametrize(
    ("rank", "size", "found", "environment", "expected"),
    [
        (1, 4, GPUS, {}, GPUS[1]),
        (3, 4, GPUS, {}, GPUS[3]),
        (1, 2, GPUS, {}, GPUS[1]),
        (2, 0, GPUS, {}, GPUS[2]),
        (0, 1, GPUS, {}, None),
        (1, 2, [], {}, None),
        (1, 2, GPUS[:1], {"CUDA_VISIBLE_DEVICES": "6"}, GPUS[0]),
        (1, 2, GPUS[:1], {"HIP_VISIBLE_DEVICES": "6"}, GPUS[0]),
        (1, 2, GPUS[:2], {"CUDA_VISIBLE_DEVICES": "6,7"}, GPUS[1]),
        (1, 2, [Device("mps", 0)], {}, None),
        (1, 2, [Device("tpu", i) for i in range(4)], {}, None),
        (1, 2, [Device("xpu", i) for i in range(2)], {}, Device("xpu", 1)),
        (1, 2, [*GPUS, Device("xpu", 0)], {}, GPUS[1]),
    ],
)
def test_a_process_has_the_accelerator_of_its_number(
    monkeypatch, rank, size, found, environment, expected
):
    set_variables(monkeypatch, environment)
    assert own_accelerator(found, RankAndSize(rank, size, "LOCAL_RANK=1")) == expected


@pytest.mark.parametrize("rank", [0, 2])
def test_too_few_accelerators_are_an_error_in_every_process(monkeypatch, rank):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    local = RankAndSize(rank, 3, f"LOCAL_RANK={rank} and LOCAL_WORLD_SIZE=3")
    text = (
        f"3 processes run on this machine (LOCAL_RANK={rank} and LOCAL_WORLD_SIZE=3, "
        "CUDA_VISIBLE_DEVICES=0,1), and this one sees 2 accelerators: gpu:0, gpu:1."
    )
    with pytest.raises(ClusterError, match=re.escape(text)):
        own_accelerator(GPUS[:2], local)


def test_without_accelerators_named_or_all_cpu_devices_are_used(monkeypatch):
    set_variables(monkeypatch, TORCHRUN)
    assert {device.kind for device in default_devices(get_engine())} == {"cpu"}
    device_selection._kept.clear()
    strategy = ks.MirroredStrategy(["cpu:0", "cpu:1"])
    assert strategy.num_replicas_in_sync == 2
    assert device_selection._kept == {}


@pytest.mark.one_backend("torch")
@pytest.mark.skipif(BACKEND != "torch", reason="Torch's devices")
def test_torch_uses_the_gpu_of_the_process(monkeypatch):
    import torch

    current: list[int] = []
    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: cuda)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    assert len(default_devices(get_engine())) == 4
    device_selection._kept.clear()
    set_variables(monkeypatch, TORCHRUN)
    for _ in range(2):
        assert default_devices(get_engine()) == (GPUS[1],)
    assert current == [1]


@pytest.mark.one_backend("tensorflow")
@pytest.mark.skipif(BACKEND != "tensorflow", reason="TensorFlow's devices")
def test_tensorflow_sees_the_gpu_of_the_process_only(monkeypatch):
    import tensorflow as tf

    visible = {"GPU": [f"GPU {i}" for i in range(4)], "CPU": ["CPU 0"]}
    monkeypatch.setattr(
        tf.config, "get_visible_devices", lambda kind: visible.get(kind, [])
    )
    monkeypatch.setattr(
        tf.config, "get_logical_device_configuration", lambda device: None
    )

    def set_visible(device: Any, kind: str) -> None:
        visible[kind] = [device]

    monkeypatch.setattr(tf.config, "set_visible_devices", set_visible)
    set_variables(monkeypatch, TORCHRUN)
    for _ in range(2):
        assert default_devices(get_engine()) == (GPUS[0],)
    assert visible["GPU"] == ["GPU 1"]


@pytest.mark.one_backend("jax")
@pytest.mark.skipif(BACKEND != "jax", reason="JAX's devices")
@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"CUDA_VISIBLE_DEVICES": "4,5,6,7"}, "1"),
        # JAX has no other one.
        ({"CUDA_VISIBLE_DEVICES": "6"}, "0"),
        ({"CUDA_VISIBLE_DEVICES": ""}, "all"),
        ({"CUDA_VISIBLE_DEVICES": "4,5,6,7", "LOCAL_WORLD_SIZE": "1"}, "all"),
    ],
)
def test_jax_sees_the_gpu_of_the_process_only(monkeypatch, environment, expected):
    import jax

    from keras_strategies.engines.jax import devices

    monkeypatch.setattr(devices, "devices_are_fixed", lambda: False)
    monkeypatch.setattr(devices, "_may_use_cuda", lambda: True)
    variables = TORCHRUN | {"LOCAL_RANK": "0"} if expected == "all" else TORCHRUN
    set_variables(monkeypatch, variables | environment)
    try:
        device_selection.keep_own_accelerator(get_engine())
        assert jax.config.values["jax_cuda_visible_devices"] == expected
    finally:
        jax.config.update("jax_cuda_visible_devices", "all")
