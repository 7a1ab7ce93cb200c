"""Torch: draws in blocks of rows, for any division into replicas."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

if keras.backend.backend() != "torch":
    pytest.skip("tests of the Torch backend", allow_module_level=True)

import torch

import keras_strategies as ks
from keras_strategies.engines.torch.data_parallel.call_on_threads import CallOnThreads
from keras_strategies.engines.torch.random_numbers import block_draws
from keras_strategies.engines.torch.random_numbers.row_numbers import (
    partitioned_step,
)

random = keras.random


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_draws, "_CPU_BLOCK", 16)


def test_blocks_of_a_draw_differ() -> None:
    with partitioned_step():
        found = random.uniform((64, 4), seed=5)
    assert len(found.unique()) == found.numel()


def test_the_generator_advances_in_a_call_that_raises(monkeypatch: Any) -> None:
    """Replicas that draw at the same time do so from copies of it."""
    with ks.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        layers = [keras.Input((3,)), keras.layers.Dropout(0.5), keras.layers.Dense(1)]
        model = keras.Sequential(layers)
        model.compile("sgd", "mse")
    x = np.ones((6, 3), "float32")
    model.train_on_batch(x, x[:, :1])
    before = torch.get_rng_state()
    model.train_on_batch(x, x[:, :1])
    expected = torch.get_rng_state()
    assert not torch.equal(before, expected)
    torch.set_rng_state(before)
    run = CallOnThreads._run

    def raising(call: Any, tasks: Any) -> Any:
        run(call, tasks)
        raise KeyError("after the draws")

    monkeypatch.setattr(CallOnThreads, "_run", raising)
    with pytest.raises(KeyError, match="after the draws"):
        model.train_on_batch(x, x[:, :1])
    assert torch.equal(torch.get_rng_state(), expected)
