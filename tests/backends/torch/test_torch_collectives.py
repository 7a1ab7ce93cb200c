"""Torch: reductions between GPUs go through NCCL; waits of Gloo end."""

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
from keras_strategies.engines.torch.gloo_waits import wait_for
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


# --- Packs ----------------------------------------------------------------------


class Wait:
    """A wait of Gloo."""

    def __init__(self, looks, error=""):
        self.looks, self.error, self.count = looks, error, 0

    def is_completed(self):
        return self.looks is not None and self.count > self.looks

    def wait(self, timeout=None):
        self.count += 1
        if not self.is_completed():
            raise RuntimeError("Operation timed out!")
        if self.error:
            raise RuntimeError(self.error)


def test_a_wait_of_gloo_without_an_end_is_given_up_when_the_group_has_ended():
    work = Wait(None)
    with pytest.raises(RuntimeError, match="timed out"):
        wait_for(work, None, lambda: work.count >= 3)
    # The second look after the end: a wait may need a moment for its own error.
    assert work.count == 4


def test_a_long_wait_of_gloo_ends_by_itself():
    wait_for(Wait(5), None, lambda: False)
    with pytest.raises(RuntimeError, match="closed by peer"):
        wait_for(Wait(1, "closed by peer"), None, lambda: True)
