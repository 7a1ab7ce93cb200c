"""Optimizers of Torch in `run` on several workers, as in a script for DDP."""

from __future__ import annotations

import keras
import numpy as np
import pytest

if keras.backend.backend() != "torch":
    pytest.skip("Torch only", allow_module_level=True)

import torch
from harness.torch_loops import (
    batches,
    distributed,
    gradients,
    loss_of,
    make_model,
)
from multi_worker.torch_shards import cut

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.1),
}


def train(strategy, name, inside, rate=0.1):
    """Two backward passes for a step, in `run` or outside; clipped, with a penalty."""
    model = make_model(strategy)
    optimizer = OPTIMIZERS[name](model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    seen = []

    def backward(x, y, rows):
        loss = loss_of(model, x, y, rows)
        if rate:
            squares = sum(p.pow(2).sum() for p in model.parameters())
            loss = loss + rate * squares * len(x) / rows
        loss.backward()

    def update():
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        return float(norm)

    def last(x, y, rows):
        backward(x, y, rows)
        seen.append(update())

    for i, (x, y) in enumerate(batches()):
        step = last if inside and i % 2 else backward
        if strategy is None:
            step(torch.from_numpy(x), torch.from_numpy(y), len(x))
        else:
            own = [distributed(strategy, each) for each in (x, y)]
            strategy.run(step, args=(*own, len(x)))
        if i == 0:
            # Torch sorts parameters by name, where dense_10 is before dense_9.
            seen += sorted(np.abs(g).sum() for g in gradients(model))
        if i % 2 and not inside:
            seen.append(update())
    weights = [keras.ops.convert_to_numpy(w) for w in model.weights]
    return weights, list(dict.fromkeys(np.round(seen, 5).tolist()))


def assert_same(found, expected):
    for weights, seen in found:
        np.testing.assert_allclose(seen, expected[1], rtol=1e-4)
        for one, other in zip(weights, expected[0], strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    "cluster", ["two", "two_by_two"], indirect=True, scope="session"
)
def test_an_optimizer_of_torch_steps_as_on_one_device(cluster, name, inside):
    def program(strategy):
        return train(strategy, name, inside)

    assert_same(cluster(program), train(None, name, inside))


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("cluster", ["two"], indirect=True, scope="session")
def test_weights_in_shards(cluster, name):
    def program(strategy):
        return train(cut("fsdp", 1), name, True, 0)

    assert_same(cluster(program), train(None, name, True, 0))
