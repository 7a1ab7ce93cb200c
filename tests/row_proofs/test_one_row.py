"""Replicas with one row: Torch computes it by other operations than more rows.

Calls whose code is that of more rows are split; calls whose code, or what it changes
in place, is another with one row are not. Either way numbers are those of one device.
"""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import keras
import numpy as np
import pytest
from harness.training import as_arrays, assert_same
from keras import layers, ops

import keras_strategies as ks

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(
    keras.backend.backend() != "torch", reason="proofs are for any rows elsewhere"
)
X = np.random.default_rng(3).normal(size=(8, 6, 4)).astype("float32")
Y = np.random.default_rng(4).normal(size=(8, 4)).astype("float32")


class Weighted(layers.Layer):
    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(4, 4), name="kernel")

    def hidden(self, x: Any) -> Any:
        return ops.matmul(x, self.kernel)


class Einsum(Weighted):
    """The contraction, also of a gradient, leaves out an axis with one entry."""

    def call(self, x: Any) -> Any:
        keys = ops.einsum("btd,de->bte", x, self.kernel)
        scores = ops.softmax(ops.einsum("bqd,bkd->bqk", x, keys))
        return ops.mean(ops.einsum("bqk,bkd->bqd", scores, keys), axis=1)


class Broadcast(Weighted):
    """A table is added to each row; its gradient is a sum over rows."""

    def build(self, shape: Any) -> None:
        super().build(shape)
        self.table = self.add_weight(shape=(1, 6, 4), name="table")

    def call(self, x: Any) -> Any:
        tokens = ops.tile(self.table, [ops.shape(x)[0], 1, 1])
        return ops.mean(self.hidden(x + self.table) * tokens, axis=1)


class ChangedCopy(Weighted):
    def call(self, x: Any) -> Any:
        hidden = self.hidden(x)
        hidden *= 0.5
        return ops.sum(ops.slice_update(hidden, [0, 0, 0], hidden[:, :2] * 0.3), axis=1)


class OwnGradient(Weighted):
    def call(self, x: Any) -> Any:
        return ops.mean(_Doubled.apply(self.hidden(x)), axis=1)


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient * 2.0


class Squeezed(Weighted):
    """With one row the batch axis is gone, and the mean is one of rows."""

    def call(self, x: Any) -> Any:
        first = ops.squeeze(self.hidden(x)[:, :1])
        return ops.mean(first, axis=0) + ops.sum(self.hidden(x), axis=1)


class Branch(Weighted):
    def call(self, x: Any) -> Any:
        hidden = ops.sum(self.hidden(x), axis=1)
        return hidden * 3.0 if x.shape[0] == 1 else hidden


class Factor(Weighted):
    """The same code, with another number."""

    def call(self, x: Any) -> Any:
        return ops.sum(self.hidden(x), axis=1) * (3.0 if x.shape[0] == 1 else 1.0)


class OtherWeight(Weighted):
    def build(self, shape: Any) -> None:
        super().build(shape)
        self.other = self.add_weight(shape=(4, 4), name="other")

    def call(self, x: Any) -> Any:
        kernel = self.other if x.shape[0] == 1 else self.kernel
        return ops.sum(ops.matmul(x, kernel), axis=1)


class OtherTable(Weighted):
    """A tensor that is no variable, another for one row."""

    tables = torch.ones(4), 3 * torch.ones(4)

    def call(self, x: Any) -> Any:
        return ops.sum(self.hidden(x), axis=1) * self.tables[x.shape[0] == 1]


class OtherResult(Weighted):
    def call(self, x: Any) -> Any:
        hidden = ops.sum(self.hidden(x), axis=1)
        tripled = hidden * 3.0
        return tripled if x.shape[0] == 1 else hidden


class OtherLoss(Weighted):
    def call(self, x: Any) -> Any:
        hidden = self.hidden(x)
        losses = ops.mean(ops.square(hidden)), ops.mean(ops.abs(hidden))
        self.add_loss(losses[x.shape[0] == 1])
        return ops.sum(hidden, axis=1)


class OtherUpdate(Weighted):
    def build(self, shape: Any) -> None:
        super().build(shape)
        self.last = self.add_weight(shape=(), trainable=False, initializer="zeros")

    def call(self, x: Any) -> Any:
        counts = self.last + 1.0, self.last + 3.0
        self.last.assign(counts[x.shape[0] == 1])
        return ops.sum(self.hidden(x), axis=1)


SPLIT = (Einsum, Broadcast, ChangedCopy)
OTHERS = (
    OwnGradient,
    Squeezed,
    Branch,
    Factor,
    OtherWeight,
    OtherTable,
    OtherResult,
    OtherLoss,
    OtherUpdate,
)


def trained(kind: type, batch: int, strategy: Any) -> tuple[Any, bool]:
    """History and weights, and whether a warning says that a call is not split."""
    keras.utils.set_random_seed(2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with strategy.scope() if strategy else contextlib.nullcontext():
            model = keras.Sequential([keras.Input((6, 4)), kind(), layers.Dense(4)])
            model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse")
        fitted = model.fit(X, Y, batch_size=batch, epochs=2, shuffle=False, verbose=0)
    weights = dict(enumerate(model.get_weights()))
    found = as_arrays({"history": fitted.history, "weights": weights})
    return found, any("split by rows" in str(w.message) for w in caught)


@pytest.mark.parametrize("kind", [*SPLIT, *OTHERS], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("replicas, batch", [(2, 3), (2, 2), (3, 4)])
def test_numbers_are_those_of_one_device(kind: type, replicas: int, batch: int) -> None:
    expected, _ = trained(kind, batch, None)
    devices = [f"cpu:{i}" for i in range(replicas)]
    found, is_unsplit = trained(kind, batch, ks.MirroredStrategy(devices))
    assert_same(expected, found, 1e-5, kind.__name__)
    assert is_unsplit == (kind in OTHERS)
