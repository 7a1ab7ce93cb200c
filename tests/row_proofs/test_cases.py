"""Each layer call of the table: placements of its results, or that it is not split.

Values hide what the operations do: weights are zero, capacities are not reached, losses
have a factor of zero. Where a call is proved, two uneven parts of a later batch give
the numbers of the batch; cases of `mixing` are not split.
"""

from __future__ import annotations

import functools
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

from keras_strategies.rows.row_placements import MEAN, ROWS, SAME, SUM, RowPlacement
from row_proofs import case_layers as own
from row_proofs import proofs
from row_proofs.case_layers import RowCase, function, mixing, mixing_function, rows
from row_proofs.split_numbers import assert_parts_equal

pytestmark = pytest.mark.one_backend("torch", "tensorflow")

TABLE = np.random.default_rng(1).normal(size=(own.BATCH, 6)).astype(own.FLOAT)
PAIR = {"updates": (SAME, SAME)}

KERAS_LAYERS = {
    "batch norm of images": rows(layers.BatchNormalization, (5, 5, 3), **PAIR),
    "batch norm and a loss": rows(own.regularized, losses=(MEAN,), **PAIR),
    "spectral": rows(lambda: layers.SpectralNormalization(layers.Dense(4)), **PAIR),
    "shared dropout": rows(lambda: layers.Dropout(0.3, noise_shape=(1, 6)), draws=(0,)),
    "conv2d dilated": rows(lambda: layers.Conv2D(4, 3, dilation_rate=2), (9, 9, 3)),
    "attention dropout": rows(
        lambda: own.Held(layers.MultiHeadAttention(2, 4, dropout=0.2), own.attend),
        (5, 8),
        draws=(1,),
    ),
    "masked LSTM": rows(lambda: own.masked(layers.LSTM(4)), own.integers(5)),
    "stateful GRU": mixing(lambda: layers.GRU(4, stateful=True), (5, 3)),
    "activity regularizer": rows(
        lambda: layers.Dense(3, activity_regularizer="l2"), losses=(MEAN,)
    ),
    "kernel regularizer": rows(lambda: layers.Dense(3, kernel_regularizer="l2")),
    "transformer of two blocks with dropout": rows(
        lambda: own.transformer(2, rate=0.1), own.integers(5), draws=(1,) * 4
    ),
}


def dense(use: Any, inner: Any = lambda: layers.Dense(6)) -> RowCase:
    """A layer of Keras, which is one operation of a proof, in the code of users."""
    return rows(lambda: own.with_loss(use, inner(), 0.0), losses=(MEAN,))


def held(make: Any, use: Any, *shapes: Any, **expected: Any) -> RowCase:
    return rows(lambda: own.Held(make(), use), *shapes, **expected)


def embeddings(*more: Any) -> keras.Model:
    return keras.Sequential([layers.Embedding(4, 6, mask_zero=True), *more])


def hidden() -> keras.Model:
    return keras.Sequential([keras.Input((6,)), layers.Dense(6, "tanh")])


#: Functions of an inner layer and of the input that mix rows.
_MIXING = {
    "layer of a table with rows": lambda layer, x: x + layer(TABLE),
    "layer of x / rows": lambda layer, x: layer(x / own.row_count(x)),
    "layer of x - mean": lambda layer, x: layer(x - ops.mean(x, 0)),
    "cumsum of a layer": lambda layer, x: ops.cumsum(layer(x), 0),
    "layer of rolled rows": lambda layer, x: layer(ops.roll(x, 1, axis=0)),
    "0 * maximum of a layer": lambda layer, x: layer(x) + 0.0 * ops.max(layer(x)),
}
KNOWN_LAYERS = {
    "layer twice": dense(lambda layer, x: layer(x) + layer(x * x)),
    "nested layer": dense(lambda layer, x: layer(layer(x)), hidden),
    "layer of a table": dense(lambda layer, x: x + ops.sum(layer(TABLE))),
    "layer of stopped rows": dense(lambda layer, x: layer(ops.stop_gradient(x))),
    "layer of flattened rows": dense(
        lambda layer, x: ops.reshape(layer(ops.reshape(x, (-1, 3))), ops.shape(x)),
        lambda: layers.Dense(3),
    ),
    "layer of a list": dense(lambda add, x: add([x, ops.ones_like(x)]), layers.Add),
    **{
        name: held(lambda: layers.Dense(6), use, problem=True)
        for name, use in _MIXING.items()
    },
    "layers with a mask that draw": held(
        lambda: embeddings(layers.LSTM(5), layers.Dropout(0.5)),
        lambda model, x: model(x, training=True),
        own.integers(3),
        draws=(1,),
    ),
    "layer with statistics": held(
        layers.BatchNormalization, lambda norm, x: norm(x, training=True), **PAIR
    ),
    "sum of masked rows": held(
        embeddings,
        lambda model, x: ops.sum(layers.Masking()(model(x)), 1),
        own.integers(3),
    ),
    # Proved by its operations.
    "rows of flattened axes": held(
        lambda: layers.Dense(6),
        lambda layer, x: layer(ops.reshape(x, (-1, 6))),
        (3, 6),
        outputs=own.multiple(3),
    ),
}


def loop_over_time(x: Any) -> Any:
    def step(i: Any, h: Any) -> Any:
        return h * 0.5 + ops.take(x, i, axis=1)

    return ops.fori_loop(0, 5, step, x[:, 0])


FUNCTIONS = {
    "transposed twice": lambda x: ops.transpose(ops.cumsum(ops.transpose(x), axis=0)),
    "x * rows / rows": lambda x: x * own.row_count(x) / own.row_count(x),
    "stack and take": lambda x: ops.stack([x, x * x], axis=0)[1],
    "zeros summed": lambda x: x + ops.sum(ops.ones((ops.shape(x)[0], 6))) * 0.0,
    "gradient clipped by row": own.with_gradient(
        lambda x, g: g / (1.0 + ops.norm(g, axis=-1, keepdims=True))
    ),
}
#: With several outputs, or an output of other rows.
OUTPUTS = {
    "two rows for each": (lambda x: ops.reshape(x, (-1, 3)), own.multiple(2)),
    "repeated rows": (lambda x: ops.repeat(x, 3, axis=0), own.multiple(3)),
    "two outputs": (lambda x: (x + 1, {"b": ops.sum(x, -1)}), (ROWS, ROWS)),
    "output without rows": (lambda x: (x, ops.ones((3,)) * 2), (ROWS, SAME)),
    "output of a sum": (lambda x: (x, ops.sum(x)), (ROWS, SUM)),
    "output of a mean": (lambda x: (x, ops.mean(x)), (ROWS, MEAN)),
    "output of a column mean": (lambda x: ops.mean(x, 0), (MEAN,)),
    "Python output": (lambda x: (x, 3.0), (ROWS, None)),
}
MIXING_FUNCTIONS = {
    "cumsum along rows": lambda x: ops.cumsum(x, axis=0),
    "constant times rows": lambda x: ops.matmul(TABLE.T, x),
    "x / rows": lambda x: x / own.row_count(x),
    "rows as an output": lambda x: (x, x.shape[0]),
    "x / <= 64 rows": lambda x: (
        x / ops.cast(ops.minimum(ops.shape(x)[0], 64), own.FLOAT)
    ),
}
OPERATIONS = {
    **{name: function(f) for name, f in FUNCTIONS.items()},
    **{name: function(f, outputs=outputs) for name, (f, outputs) in OUTPUTS.items()},
    **{name: mixing_function(f) for name, f in MIXING_FUNCTIONS.items()},
    "argument without rows": function(lambda x, t: x * t, (6,), own.whole(6)),
    "a table": function(
        lambda i, t: ops.take(t, i, 0), own.integers(3), own.whole(9, 4)
    ),
    "argument of as many": mixing_function(
        lambda x, t: x + t, (6,), own.whole(own.BATCH, 6)
    ),
    "x @ transpose(t)": mixing_function(lambda x, t: x @ ops.transpose(t), (6,), (6,)),
    # The zeros of its gradient are filled for all rows, and constants for parts.
    "clip of many columns": function(lambda x: ops.clip(x, -1, 1), (200,)),
    "loop over time": function(loop_over_time, (5, 3)),
    "codebook": rows(lambda: own.Own(own.codebook, codes=(5, 6)), losses=(MEAN, MEAN)),
    "sampling": rows(lambda: own.sampled(lambda x: ops.shape(x)), draws=(1,)),
    "one draw for all rows": rows(lambda: own.sampled(lambda x: (1, 6)), draws=(0,)),
    "capacity": mixing(lambda: own.Own(own.experts, router=(6, 2), experts=(2, 6, 6))),
    # Zero at first, with as many entries as the batch.
    "weight with rows": mixing(
        lambda: own.Own(
            lambda layer, x: x + layer.table,
            table={"shape": (own.BATCH, 6), "initializer": "zeros"},
        )
    ),
}
if keras.backend.backend() != "tensorflow":  # It takes no arrays as indices.
    OPERATIONS["an entry by the number of its row"] = mixing_function(
        lambda x: x[np.arange(x.shape[0]), np.arange(x.shape[0])], (200,)
    )


def padded_sum(x: Any, **options: Any) -> Any:
    return ops.sum(ops.pad(ops.sum(x, 0), ((0, 1),), **options))


def crossentropy(x: Any) -> Any:
    found = ops.sparse_categorical_crossentropy(ops.argmax(x, -1), x, from_logits=True)
    return ops.mean(found)


#: With their placement; None for those that mix rows.
LOSSES: dict[str, tuple[Any, RowPlacement | None]] = {
    "0 * sum": (lambda x: 0.0 * ops.sum(x * x), SUM),
    "0 * mean": (lambda x: 0.0 * ops.mean(x * x), MEAN),
    "sum / rows": (lambda x: ops.sum(x * x) / own.row_count(x), MEAN),
    "mean + 1": (lambda x: 1 + ops.mean(x), MEAN),
    "sum and its half": (lambda x: ops.sum(x) - 0.5 * ops.sum(x * x), SUM),
    "crossentropy": (crossentropy, MEAN),
    "sum padded by 0": (padded_sum, SUM),
    "sum + 0 * mean": (lambda x: ops.sum(x) + 0.0 * ops.mean(x), None),
    "padded sum": (lambda x: padded_sum(x, constant_values=2.0), None),
}


def loss(of: Any, kind: RowPlacement | None) -> RowCase:
    make = functools.partial(own.add_loss, of)
    return rows(make, losses=(kind,)) if kind else mixing(make)


UPDATES = {
    "counter": rows(lambda: own.tracked(lambda v, x: v + 1), updates=(SAME,)),
    "moving average of a mean": rows(
        lambda: own.tracked(lambda v, x: 0.9 * v + 0.1 * ops.mean(x)), updates=(MEAN,)
    ),
    "rows counted": mixing(lambda: own.tracked(lambda v, x: v + own.row_count(x))),
    "rows kept": mixing(lambda: own.tracked(lambda v, x: x, (own.BATCH, 6))),
}


def of_weight(gradient: Any) -> Any:
    multiply = own.with_gradient(gradient)
    return lambda: own.scaled(lambda layer, x: x * multiply(layer.scale))


WEIGHTS = {
    "loss of weights": rows(lambda: own.scaled(own.weight_loss), losses=(SAME,)),
    "clipped gradient": mixing(of_weight(lambda w, g: g / (1e6 + ops.norm(g)))),
    "scaled gradient": rows(of_weight(lambda w, g: 3.0 * g)),
    "constant gradient": mixing(of_weight(lambda w, g: ops.ones_like(g))),
}
CASES: dict[str, RowCase] = {
    **KERAS_LAYERS,
    **KNOWN_LAYERS,
    **OPERATIONS,
    **{name: loss(*each) for name, each in LOSSES.items()},
    **UPDATES,
    **WEIGHTS,
}

#: Parts of these need the statistics of all replicas.
COLLECTIVES = ("batch norm of images", "batch norm and a loss", "layer with statistics")
AT_NIGHT = "transformer of two blocks with dropout"
#: Those of a program for any number of rows, one of each kind of rules.
ANY_ROWS = (
    *("conv2d dilated", "masked LSTM", "x * rows / rows", "repeated rows"),
    *("cumsum along rows", "capacity", "x / rows", "x / <= 64 rows"),
    *("sum / rows", "moving average of a mean", "loop over time"),
)


@pytest.mark.one_backend("torch", "tensorflow")
@pytest.mark.slow(seconds=6)
@proofs.needs_split
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.nightly] * (n == AT_NIGHT)) for n in CASES],
)
def test_placements(name: str) -> None:
    case = CASES[name]
    layer, values = proofs.built(case)
    proof = proofs.proof_of(layer, values, case.has_rows)
    if case.problem:
        assert proof.problem is not None
        return
    assert proof.problem is None
    assert tuple(proof.outputs) == case.outputs
    assert tuple(proof.losses) == case.losses
    assert tuple(proofs.placed_updates(layer, proof)) == case.updates
    assert tuple(proof.draws) == case.draws
    if any(case.draws) or name in COLLECTIVES:
        return
    random = np.random.default_rng(23)
    later = [argument.value(own.BATCH, random) for argument in case.arguments]
    assert_parts_equal(layer, later, proof, case.has_rows)


@pytest.mark.one_backend("tensorflow")
@proofs.of_tensorflow
@pytest.mark.parametrize("name", ANY_ROWS)
def test_placements_for_any_number_of_rows(name: str) -> None:
    case = CASES[name]
    layer, values = proofs.built(case)
    proof = proofs.proof_of(layer, values, case.has_rows, sizes=())
    assert (proof.problem is not None) == case.problem
    if not case.problem:
        assert tuple(proof.outputs) == case.outputs
        assert tuple(proof.losses) == case.losses
