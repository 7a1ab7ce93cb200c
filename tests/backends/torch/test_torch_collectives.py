"""Torch: reductions between GPUs go through NCCL."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import keras_strategies as ks
from keras_strategies.types import ReduceOp

if keras.backend.backend() != "torch":
    pytest.skip("tests of the Torch backend", allow_module_level=True)

import torch

from keras_strategies.engines import get_engine
from keras_strategies.engines.torch.replicas.nccl_reduce import nccl_all_reduce

EXPECTED = {"sum": [4, 6], "mean": [2, 3], "min": [1, 2], "max": [3, 4]}


def on(devices):
    values = ([1.0, 2.0], [3.0, 4.0])
    return [
        torch.tensor(value, device=device)
        for value, device in zip(values, devices, strict=True)
    ]


@pytest.mark.parametrize("op", EXPECTED)
def test_values_on_cpus_do_not_go_through_nccl(op):
    tensors = on(["cpu", "cpu"])
    assert nccl_all_reduce(ReduceOp.parse(op), tensors) is None
    for reduced in get_engine().all_reduce(ReduceOp.parse(op), tensors):
        np.testing.assert_array_equal(reduced, EXPECTED[op])


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("op", EXPECTED)
def test_values_on_two_gpus_are_reduced_by_nccl(op):
    tensors = on(["cuda:0", "cuda:1"])
    found = nccl_all_reduce(ReduceOp.parse(op), tensors)
    assert [str(tensor.device) for tensor in found] == ["cuda:0", "cuda:1"]
    for tensor in found:
        np.testing.assert_allclose(tensor.cpu(), EXPECTED[op])
    whole = [tensor.int() for tensor in tensors]
    assert nccl_all_reduce(ReduceOp.SUM, whole) is None
    value = ks.PerReplica(tuple(tensors))
    reduced = ks.NcclAllReduce().reduce(op, value, ["gpu:0", "gpu:1"])
    for tensor in reduced.values:
        np.testing.assert_allclose(tensor.cpu(), EXPECTED[op])
