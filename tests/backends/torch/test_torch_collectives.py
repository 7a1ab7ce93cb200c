"""Torch: NCCL between GPUs; reductions keep memory formats, such as channels last."""

from __future__ import annotations

from typing import Any

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


SHAPE = (3, 4, 5)


def images(rows: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows)
    made = torch.randn(rows, *SHAPE, generator=generator)
    return made.to(memory_format=torch.channels_last)


def is_channels_last(tensor: torch.Tensor) -> bool:
    is_last = tensor.is_contiguous(memory_format=torch.channels_last)
    return is_last and not tensor.is_contiguous()


def assert_channels_last(value: Any) -> None:
    tensors = ks.get_strategy().experimental_local_results(value)
    assert all(map(is_channels_last, tensors)), [tensor.stride() for tensor in tensors]


@pytest.mark.parametrize("make", [lambda: None, ks.NcclAllReduce])
def test_reductions_and_gathers(make) -> None:
    strategy = ks.MirroredStrategy(["cpu:0", "cpu:1"], cross_device_ops=make())
    value = strategy.experimental_distribute_values_from_function(
        lambda context: images(2 + context.replica_id_in_sync_group)[:2]
    )

    def on_replica(x: Any) -> Any:
        context = ks.get_replica_context()
        sums = context.all_reduce("sum", [x, x + 1])
        return (*sums, context.all_gather(x, 0))

    expected = images(2) + images(3)[:2]
    with strategy.scope():
        total, other, gathered = strategy.run(on_replica, args=(value,))
        reduced = strategy.reduce("SUM", value, axis=None)
        for result in (total, other, gathered, reduced, strategy.gather(value, 0)):
            assert_channels_last(result)
        (first, _) = strategy.experimental_local_results(total)
    np.testing.assert_array_equal(first, expected)
    np.testing.assert_array_equal(reduced, expected)
