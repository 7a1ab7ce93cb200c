"""A linear model, trained by a loop on uneven batches: all parts of a `run` at once."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from keras import ops

import keras_strategies as ks

RATE = 0.125
WEIGHTS = np.float32([2.0, -1.0])
#: Rows of each replica: even, uneven and none.
BATCHES = [(2, 2), (3, 1), (4, 0)]


def data() -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(7).normal(size=(4, 2)).astype("float32")
    return x, x @ WEIGHTS + 0.5


def per_replica(array: np.ndarray, first: int) -> ks.PerReplica:
    """The first rows on one replica, the rest on the other."""
    parts = (array[:first], array[first:])
    return ks.PerReplica([ops.convert_to_tensor(part) for part in parts])


def reference(steps: int) -> tuple[np.ndarray, list[float]]:
    """Gradient descent on the mean square, on one device."""
    x, y = data()
    x = np.concatenate([x, np.ones((4, 1), "float32")], axis=1)
    weights, losses = np.zeros(3), []
    for _ in range(steps):
        error = x @ weights - y
        losses.append(float(np.mean(error**2)))
        weights = weights - RATE * 2 * x.T @ error / 4
    return weights, losses


class Loop:
    """A linear model, its gradients summed in one of two ways."""

    def __init__(self, strategy: Any, sums_by_hand: bool):
        self.strategy = strategy
        self.sums_by_hand = sums_by_hand
        self.merged: list[int] = []
        with strategy.scope():
            self.kernel = keras.Variable(np.zeros(2, "float32"))
            self.bias = keras.Variable(np.float32(0))
            self.optimizer = keras.optimizers.SGD(RATE)
            self.rows = keras.metrics.Sum()
            self.optimizer.build([self.kernel, self.bias])

    def step(self, x: Any, y: Any) -> float:
        """A step on the replicas' rows; returns the loss of the global batch."""
        losses = self.strategy.run(self.replica_step, args=(x, y))
        return float(self.strategy.reduce("SUM", losses, axis=0)) / 4

    def replica_step(self, x: Any, y: Any) -> Any:
        replica = ks.get_replica_context()
        count = ops.cast(ops.shape(x)[0], "float32")
        total = replica.all_reduce("SUM", count)
        self.rows.update_state(count)

        def loss_of() -> Any:
            squares = self.squares(x, y)
            return ops.sum(squares) / total, squares

        variables = [self.kernel, self.bias]
        (_, squares), gradients = ks.value_and_grad(loss_of, variables, has_aux=True)()
        if self.sums_by_hand:
            gradients = replica.all_reduce("SUM", gradients)
            with ks.gradients_are_aggregated():
                self.optimizer.apply(gradients, variables)
        else:
            self.optimizer.apply(gradients, variables)
        replica.merge_call(self.note, args=(count,))
        return squares

    def squares(self, x: Any, y: Any) -> Any:
        return (ops.sum(x * self.kernel, axis=1) + self.bias - y) ** 2

    def note(self, strategy: Any, count: Any) -> None:
        self.merged.append(len(strategy.experimental_local_results(count)))


@pytest.mark.one_backend
@pytest.mark.parametrize("sums_by_hand", [False, True])
def test_a_linear_model_on_uneven_rows_equals_one_device(
    mirrored: Any, sums_by_hand: bool
) -> None:
    loop = Loop(mirrored, sums_by_hand)
    x, y = data()
    losses = []
    for first, _ in BATCHES * 2:
        if keras.backend.backend() == "jax":
            # Replicas that exchange have equal rows there.
            first = len(x) // 2
        losses.append(loop.step(per_replica(x, first), per_replica(y, first)))
    weights, expected = reference(len(losses))
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    found = [*ops.convert_to_numpy(loop.kernel), float(loop.bias.numpy())]
    np.testing.assert_allclose(found, weights, rtol=1e-4)
    assert int(loop.optimizer.iterations.numpy()) == len(losses)
    assert float(loop.rows.result()) == 4 * len(losses)
    gathered = mirrored.gather(per_replica(x, 3), axis=0)
    np.testing.assert_array_equal(ops.convert_to_numpy(gathered), x)
