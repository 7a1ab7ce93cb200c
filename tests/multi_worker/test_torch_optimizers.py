"""Optimizers of Torch in `run` on several workers, as in a script for DDP."""

from __future__ import annotations

import keras
import numpy as np
import pytest

if keras.backend.backend() != "torch":
    pytest.skip("Torch only", allow_module_level=True)

import torch
from harness.torch_loops import batches, distributed, gradients, loss_of, make_model
from multi_worker.torch_shards import cut


def train(strategy, inside, rate=0.1):
    """Two backward passes for a step, in `run` or outside; clipped, with a penalty."""
    model = make_model(strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)
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


@pytest.mark.parametrize(
    ("cluster", "how"),
    [
        *(("two", how) for how in ("inside", "outside", "shards")),
        *(("two_by_two", how) for how in ("inside", "outside")),
    ],
    indirect=["cluster"],
    scope="session",
)
def test_an_optimizer_of_torch_steps_as_on_one_device(cluster, how):
    arguments = (how != "outside", 0 if how == "shards" else 0.1)

    def program(strategy):
        return train(cut() if how == "shards" else strategy, *arguments)

    expected, expected_norms = train(None, *arguments)
    for weights, norms in cluster(program):
        np.testing.assert_allclose(norms, expected_norms, rtol=1e-4)
        for one, other in zip(weights, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
