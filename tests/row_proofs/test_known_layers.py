"""Keras's own layers in the code of users: each is one operation of a proof."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

from keras_strategies.rows.row_placements import (
    MEAN,
    ROWS,
    SAME,
    RowKind,
    RowPlacement,
)
from row_proofs.proofs import needs_split, placed_updates, proof_of
from row_proofs.row_case import BATCH
from row_proofs.split_numbers import assert_parts_equal

pytestmark = pytest.mark.one_backend("torch", "tensorflow")

TABLE = np.random.default_rng(1).normal(size=(BATCH, 6)).astype("float32")


class Inner(layers.Layer):
    """Calls a layer of Keras's by a function of the user's.

    Args:
        inner: the layer.
        use: function of the layer and the input.
    """

    def __init__(self, inner: Any, use: Any):
        super().__init__()
        self.inner = inner
        self.use = use

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        return self.use(self.inner, inputs)


class WithLoss(Inner):
    def call(self, inputs: Any, training: bool | None = None) -> Any:
        found = self.use(self.inner, inputs)
        self.add_loss(0.0 * ops.mean(ops.square(found)))
        return found


def proof(layer: Any, *shape: int, dtype: str = "float32") -> Any:
    """The layer's proof, checked by numbers of two parts of a later batch."""
    random = np.random.default_rng(7)
    values = random.integers(0, 4, (2, BATCH, *shape))
    if dtype == "float32":
        values = random.normal(size=values.shape)
    first, later = values.astype(dtype)
    layer(ops.convert_to_tensor(first), training=True)
    found = proof_of(layer, [first], [True])
    is_batch_norm = any(v.path.endswith("moving_mean") for v in layer.variables)
    if found.problem is None and not found.draws and not is_batch_norm:
        assert_parts_equal(layer, [later], found)
    return found


def head() -> Any:
    return keras.Sequential([keras.Input((6,)), layers.Dense(6, "tanh")])


@pytest.mark.one_backend("torch", "tensorflow")
@needs_split
@pytest.mark.parametrize(
    ("inner", "use"),
    [
        (lambda: layers.Dense(6), lambda layer, x: layer(x) + layer(x * x)),
        (head, lambda layer, x: layer(layer(x))),
        (lambda: layers.Dense(6), lambda layer, x: x + ops.sum(layer(TABLE))),
        (lambda: layers.Dense(6), lambda layer, x: layer(ops.stop_gradient(x))),
        (
            lambda: layers.Dense(3),
            lambda layer, x: ops.reshape(
                layer(ops.reshape(x, (-1, 3))), (ops.shape(x)[0], 6)
            ),
        ),
        (lambda: layers.Add(), lambda layer, x: layer([x, ops.ones_like(x)])),
    ],
    ids=["twice", "nested", "table", "stopped", "flattened", "list"],
)
def test_rows(inner: Any, use: Any) -> None:
    found = proof(WithLoss(inner(), use), 6)
    assert found.problem is None
    assert (found.outputs, found.losses) == ([ROWS], [MEAN])


@needs_split
@pytest.mark.parametrize(
    "use",
    [
        lambda layer, x: x + layer(TABLE),
        lambda layer, x: layer(x / ops.cast(ops.shape(x)[0], "float32")),
        lambda layer, x: layer(x - ops.mean(x, 0)),
        lambda layer, x: ops.cumsum(layer(x), 0),
        lambda layer, x: layer(ops.roll(x, 1, axis=0)),
        lambda layer, x: layer(x) + 0.0 * ops.max(layer(x)),
    ],
    ids=["table", "number", "mean", "cumsum", "rolled", "maximum"],
)
def test_mixed(use: Any) -> None:
    found = proof(Inner(layers.Dense(6), use), 6)
    assert found.problem is not None


@pytest.mark.one_backend("torch", "tensorflow")
@needs_split
def test_masks_updates_and_draws() -> None:
    model = keras.Sequential(
        [layers.Embedding(4, 6, mask_zero=True), layers.LSTM(5), layers.Dropout(0.5)]
    )
    whole = Inner(model, lambda model, x: model(x, training=True))
    found = proof(whole, 3, dtype="int32")
    assert (found.problem, found.outputs) == (None, [ROWS])
    assert tuple(found.draws) == (1,)

    norm = Inner(layers.BatchNormalization(), lambda n, x: n(x, training=True))
    found = proof(norm, 6)
    assert (found.problem, found.outputs) == (None, [ROWS])
    assert placed_updates(norm, found) == [SAME, SAME]

    masked = Inner(
        keras.Sequential([layers.Embedding(4, 6, mask_zero=True)]),
        lambda model, x: ops.sum(layers.Masking()(model(x)), axis=1),
    )
    found = proof(masked, 3, dtype="int32")
    assert (found.problem, found.outputs) == (None, [ROWS])


@needs_split
def test_rows_of_flattened_axes_are_proved_by_operations() -> None:
    flat = Inner(layers.Dense(6), lambda layer, x: layer(ops.reshape(x, (-1, 6))))
    found = proof(flat, 3, 6)
    assert found.outputs == [RowPlacement(RowKind.ROWS, multiple=3)]
