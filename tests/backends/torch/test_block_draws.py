"""Torch: draws in blocks of rows, for any division into replicas."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
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
    seeing_draws,
)
from keras_strategies.runtime.random_numbers.row_draws import (
    OwnRows,
    ProvedDraws,
    drawing,
)

X = torch.rand(13, 4) + 0.5
IMAGES = torch.rand(13, 3, 4, 4).to(memory_format=torch.channels_last)
random = keras.random

DRAWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "normal": lambda x: random.normal((len(x), 4), seed=5),
    "uniform-of-rows": lambda x: random.uniform((len(x), 4), 0.0, x, seed=5),
    "truncated_normal": lambda x: random.truncated_normal((len(x), 4), seed=5),
    "randint": lambda x: random.randint((len(x), 4), 3, 9, seed=5),
    "categorical": lambda x: random.categorical(torch.log(x), 5, seed=5),
    "dropout": lambda x: random.dropout(x, 0.4, seed=5),
    "dropout-of-a-tensor": lambda x: random.dropout(x, torch.tensor(0.4), seed=5),
    "dropout-noise-of-images": lambda x: random.dropout(x, 0.4, (None, 1, 4, 4)),
    "shuffle": lambda x: random.shuffle(x, axis=1, seed=5),
    "gamma-of-rows": lambda x: random.gamma((len(x), 4), x, seed=5),
    "binomial-of-rows": lambda x: random.binomial((len(x), 4), 9.0, x / 2, seed=5),
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_draws, "_CPU_BLOCK", 16)


def following() -> tuple[float, float]:
    """The next numbers of Torch's and of Keras's generator."""
    return float(torch.rand(())), float(random.uniform(()))


def drawn(
    name: str, sizes: Sequence[int], replica: int
) -> tuple[torch.Tensor, tuple[float, float]]:
    """What a replica draws, and the numbers that follow."""
    x = IMAGES if name.endswith("-of-images") else X
    bounds = [0, *itertools.accumulate(sizes)]
    own = x[bounds[replica] : bounds[replica + 1]]
    keras.utils.set_random_seed(3)
    draws = ProvedDraws((1,), OwnRows.of(sizes, replica), name, is_partitioned=True)
    with drawing(draws), seeing_draws():
        found = DRAWS[name](own)
    return found, following()


@pytest.mark.parametrize("name", DRAWS)
def test_replicas_draw_parts_of_the_draw_of_one_device(name: str) -> None:
    keras.utils.set_random_seed(3)
    with partitioned_step():
        expected = DRAWS[name](IMAGES if name.endswith("-of-images") else X)
    after = following()
    for sizes in ((13,), (7, 6), (5, 4, 4), (1, 0, 11, 1)):
        parts = [drawn(name, sizes, i) for i in range(len(sizes))]
        torch.testing.assert_close(torch.cat([p for p, _ in parts]), expected)
        assert all(each == after for _, each in parts)


def test_blocks_of_a_draw_differ() -> None:
    with partitioned_step():
        found = random.uniform((64, 4), seed=5)
    assert len(found.unique()) == found.numel()


def test_gradients_are_those_of_one_device() -> None:
    def gradient(x: torch.Tensor) -> Any:
        x = x.detach().requires_grad_()
        noisy = random.dropout(x, 0.5) + random.uniform((len(x), 4), 0.0, x, seed=2)
        return torch.autograd.grad(noisy.sum(), x)[0]

    keras.utils.set_random_seed(3)
    with partitioned_step():
        expected = gradient(X)
    found = []
    for replica, own in enumerate(X.split([5, 8])):
        keras.utils.set_random_seed(3)
        rows = OwnRows.of((5, 8), replica)
        draws = ProvedDraws((1, 1), rows, "layer", is_partitioned=True)
        with drawing(draws), seeing_draws():
            found.append(gradient(own))
    torch.testing.assert_close(torch.cat(found), expected)


def test_draws_of_torch_are_its_own() -> None:
    """Also as long as the rows: what a step draws from Torch follows its generator."""
    torch.manual_seed(3)
    expected = torch.rand(13, 4)
    torch.manual_seed(3)
    draws = ProvedDraws((), OwnRows(0, 13, 26), "layer", is_partitioned=True)
    with drawing(draws), seeing_draws():
        assert torch.equal(torch.rand(13, 4), expected)


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
