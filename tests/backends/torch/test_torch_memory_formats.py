"""Torch: memory formats of reductions, such as channels last."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

import keras_strategies as ks

if keras.backend.backend() != "torch":
    pytest.skip("tests of the Torch backend", allow_module_level=True)

import torch

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
