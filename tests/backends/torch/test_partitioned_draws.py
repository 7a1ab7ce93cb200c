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
from torch.nn import functional

import keras_strategies as ks
from keras_strategies.engines.torch.data_parallel.call_on_threads import CallOnThreads
from keras_strategies.engines.torch.replicas import partitioned_draws
from keras_strategies.engines.torch.replicas.row_numbers import (
    RowNumbers,
    partitioned_step,
)
from keras_strategies.runtime.data_parallel.row_draws import (
    OwnRows,
    ProvedDraws,
    drawing,
)

X = torch.rand(13, 4) + 0.5
IMAGES = torch.rand(13, 3, 4, 4).to(memory_format=torch.channels_last)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


DRAWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rand": lambda x: torch.rand(len(x), 4),
    "rand-size": lambda x: torch.rand(size=(len(x), 4), generator=generator()),
    "rand-one-axis": lambda x: torch.rand(len(x)),
    "rand-out": lambda x: torch.rand((len(x), 4), out=torch.empty(0)),
    "randn": lambda x: torch.randn((len(x), 4), dtype=torch.float64),
    "randint": lambda x: torch.randint(9, (len(x), 4)),
    "randint-low": lambda x: torch.randint(3, 9, (len(x), 4), generator=generator()),
    "normal": lambda x: torch.normal(1.0, 2.0, (len(x), 4)),
    "normal-of-tensors": lambda x: torch.normal(x, torch.ones(4)),
    "bernoulli": lambda x: torch.bernoulli(x / 2, generator=generator()),
    "multinomial": lambda x: torch.multinomial(x, 5, replacement=True).float(),
    "rand_like": torch.rand_like,
    "normal_": lambda x: torch.empty_like(x).normal_(),
    "uniform_-of-images": lambda x: torch.empty_like(x).uniform_(),
    "dropout": lambda x: functional.dropout(x, 0.4, True),
    "dropout-of-images": lambda x: functional.dropout(x, 0.4, True),
    "dropout2d-of-images": lambda x: functional.dropout2d(x, 0.4, True),
    "dropout-all": lambda x: functional.dropout(x, 1.0, True),
    "alpha_dropout": lambda x: functional.alpha_dropout(x, 0.4, True),
    "rrelu": lambda x: functional.rrelu(x - 1, training=True),
    "gumbel_softmax": functional.gumbel_softmax,
    "poisson": lambda x: torch.poisson(5 * x, generator()),
    "binomial": lambda x: torch.binomial(torch.tensor(9.0), x / 2),
    "gamma": lambda x: torch.distributions.Gamma(x, torch.ones(())).sample(),
    "dirichlet": lambda x: torch.distributions.Dirichlet(
        x, validate_args=False
    ).sample(),
    "attention-of-images": lambda x: functional.scaled_dot_product_attention(
        x, x, x, dropout_p=0.3
    ),
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partitioned_draws, "_CPU_BLOCK", 16)


def drawn(
    name: str, sizes: Sequence[int], replica: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a replica draws, and the next number of the process's generator."""
    x = IMAGES if name.endswith("-of-images") else X
    bounds = [0, *itertools.accumulate(sizes)]
    own = x[bounds[replica] : bounds[replica + 1]]
    torch.manual_seed(3)
    draws = ProvedDraws((1,), OwnRows.of(sizes, replica), name, is_partitioned=True)
    with drawing(draws), RowNumbers():
        found = DRAWS[name](own)
    return found, torch.rand(())


@pytest.mark.parametrize("name", DRAWS)
def test_replicas_draw_parts_of_the_draw_of_one_device(name: str) -> None:
    torch.manual_seed(3)
    with partitioned_step(only_of_keras=False):
        expected = DRAWS[name](IMAGES if name.endswith("-of-images") else X)
    following = torch.rand(())
    for sizes in ((13,), (7, 6), (5, 4, 4), (1, 0, 11, 1)):
        parts = [drawn(name, sizes, i) for i in range(len(sizes))]
        torch.testing.assert_close(torch.cat([p for p, _ in parts]), expected)
        assert all(after == following for _, after in parts)


def test_gradients_are_those_of_one_device() -> None:
    def gradient(x: torch.Tensor) -> Any:
        x = x.detach().requires_grad_()
        loss = functional.dropout(x, 0.5, True) + functional.alpha_dropout(x, 0.5, True)
        return torch.autograd.grad(loss.sum(), x)[0]

    torch.manual_seed(3)
    with partitioned_step(only_of_keras=False):
        expected = gradient(X)
    found = []
    for replica, own in enumerate(X.split([5, 8])):
        torch.manual_seed(3)
        rows = OwnRows.of((5, 8), replica)
        draws = ProvedDraws((1, 1), rows, "layer", is_partitioned=True)
        with drawing(draws), RowNumbers():
            found.append(gradient(own))
    torch.testing.assert_close(torch.cat(found), expected)


def test_a_replica_draws_its_rows_and_less_than_two_blocks(monkeypatch: Any) -> None:
    counts: list[int] = []
    original = partitioned_draws.uninitialized_rows

    def noted(like: torch.Tensor, count: int) -> torch.Tensor:
        counts.append(count * like[0].numel())
        return original(like, count)

    monkeypatch.setattr(partitioned_draws, "uninitialized_rows", noted)
    block = 2**15
    monkeypatch.setattr(partitioned_draws, "_CPU_BLOCK", block)
    rows = OwnRows(before=7 * 150, own=150, total=8 * 150)
    with (
        drawing(ProvedDraws((1,), rows, "layer", is_partitioned=True)),
        RowNumbers(),
    ):
        found = functional.dropout(torch.ones(150, 1024), 0.5, True)
    factors, *blocks = counts
    assert factors == found.numel()
    assert sum(blocks) < 2 * block, "blocks of own rows are drawn in place"


def test_permutations_have_all_entries() -> None:
    with partitioned_step(only_of_keras=False):
        assert sorted(torch.randperm(100).tolist()) == list(range(100))


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
