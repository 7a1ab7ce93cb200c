"""Torch: what a `train_step` on workers does with the value of a loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest

if keras.backend.backend() != "torch":
    pytest.skip("steps of Torch", allow_module_level=True)

import torch
from harness.training import numbers
from multi_worker.clusters import assert_as_one_device, on_clusters

ROWS, WIDTH, BATCH = 13, 3, 5
_random = np.random.default_rng(6)
X = _random.normal(size=(ROWS, WIDTH)).astype("float32")
Y = X.sum(1, keepdims=True)
WEIGHTS = np.linspace(0.5, 2.0, ROWS).astype("float32")


class Step(keras.Model):
    """A step that does something with the loss before its backward pass."""

    def __init__(self, use: Callable[..., Any]) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(4, activation="tanh")
        self.out = keras.layers.Dense(1)
        self.use = use
        self.mean = keras.metrics.Mean(name="own")
        self.sum = keras.metrics.Sum(name="sum")
        self.seen: list[Any] = []

    def call(self, x: Any) -> Any:
        return self.out(self.dense(x))

    def train_step(self, data: Any) -> Any:
        x, y, weights = data
        self.zero_grad()
        loss = self.compute_loss(x, y, self(x, training=True), weights)
        loss, found = self.use(self, loss)
        loss.backward()
        self.seen.append(found)
        variables = self.trainable_variables
        with torch.no_grad():
            self.optimizer.apply([v.value.grad for v in variables], variables)
        return {metric.name: metric.result() for metric in self.metrics}


def in_metrics(model: Any, loss: Any) -> Any:
    model.mean.update_state(loss, sample_weight=3)
    model.mean.update_state(2 * loss)
    model.sum.update_state(loss)
    return loss, []


def of_changes(model: Any, loss: Any) -> Any:
    before = loss * 1
    alias = loss.detach()
    alias.mul_(3)
    after = loss * 1
    other = 2 * loss.detach()
    other += 1
    other.copy_(loss.detach() * 4)
    return before, [before, after, alias, other]


def of_branches(model: Any, loss: Any) -> Any:
    return (loss if loss > 1 else 2 * loss), []


def of_gradients(model: Any, loss: Any) -> Any:
    loss.backward(torch.tensor(0.5), retain_graph=True)
    values = [v.value for v in model.trainable_variables]
    return loss, list(torch.autograd.grad(loss, values, retain_graph=True))


USES = (in_metrics, of_changes, of_branches, of_gradients)


def used(strategy: Any, use: Callable[..., Any]) -> dict[str, Any]:
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = Step(use)
        model.compile(keras.optimizers.SGD(0.02), "mse")
        model.build((None, WIDTH))
    history = model.fit(
        X, Y, BATCH, epochs=2, sample_weight=WEIGHTS, shuffle=False, verbose=0
    )
    seen = map(keras.ops.convert_to_numpy, keras.tree.flatten(model.seen))
    return numbers(model, history, *seen)


@on_clusters("two", "two_by_two")
@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_uses_of_a_loss_have_the_numbers_of_one_device(cluster: Any, use: Any) -> None:
    assert_as_one_device(cluster, used, use)
