"""Each layer call of the table: placements of its results, or that it is not split.

Values hide what the operations do: weights are zero, capacities are not reached, losses
have a factor of zero. Random programs are chains of functions that keep the shape.
"""

from __future__ import annotations

import functools
import operator
import random
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

from keras_strategies.rows.row_placements import MEAN, ROWS, SAME, SUM, RowPlacement
from row_proofs import proofs as own
from row_proofs.proofs import RowCase, function, mixing, mixing_function, rows

pytestmark = pytest.mark.one_backend("torch", "tensorflow")

TABLE = np.random.default_rng(1).normal(size=(own.BATCH, 6)).astype(own.FLOAT)
PAIR = {"updates": (SAME, SAME)}
ZEROS = {"shape": (own.BATCH, 6), "initializer": "zeros"}
IDS, AS_MANY = own.integers(3), own.whole(own.BATCH, 6)
AT_NIGHT = "transformer of two blocks with dropout"
CLIPPED = own.with_gradient(lambda x, g: g / (1 + ops.norm(g, axis=-1, keepdims=True)))
dense6, dense3 = functools.partial(layers.Dense, 6), functools.partial(layers.Dense, 3)
training = functools.partial(operator.call, training=True)


def sampled(shape_of: own.Function) -> own.Held:
    """The sampling of a variational autoencoder."""
    draw, seed = keras.random.normal, keras.random.SeedGenerator(5)
    return own.Held(seed, lambda seed, x: x + draw(shape_of(x), seed=seed))


def transformer(blocks: int, rate: float) -> keras.Model:
    inputs = keras.Input((5,), dtype="int32")
    x = layers.Embedding(50, 16)(inputs)
    for _ in range(blocks):
        y = layers.LayerNormalization()(x)
        attention = layers.MultiHeadAttention(2, 8, dropout=rate)
        x = x + attention(y, y, use_causal_mask=True)
        y = layers.Dense(64, "gelu")(layers.LayerNormalization()(x))
        x = x + layers.Dropout(rate)(layers.Dense(16)(y))
    return keras.Model(inputs, layers.Dense(50)(x))


def masked(inner: layers.Layer) -> keras.Model:
    inputs = keras.Input((5,), dtype="int32")
    return keras.Model(inputs, inner(layers.Embedding(9, 8, mask_zero=True)(inputs)))


def regularized() -> own.Own:
    norm = keras.Sequential([layers.Dense(4), layers.BatchNormalization()])
    return own.with_loss(operator.call, norm, 1.0)


def held(make: Any, use: Any, *shapes: Any, **expected: Any) -> RowCase:
    return rows(lambda: own.Held(make(), use), *shapes, **expected)


KERAS_LAYERS = {
    "batch norm of images": rows(layers.BatchNormalization, (5, 5, 3), **PAIR),
    "batch norm and a loss": rows(regularized, losses=(MEAN,), **PAIR),
    "spectral": rows(lambda: layers.SpectralNormalization(layers.Dense(4)), **PAIR),
    "shared dropout": rows(lambda: layers.Dropout(0.3, noise_shape=(1, 6)), draws=(0,)),
    "conv2d dilated": rows(lambda: layers.Conv2D(4, 3, dilation_rate=2), (9, 9, 3)),
    "attention dropout": held(
        lambda: layers.MultiHeadAttention(2, 4, dropout=0.2),
        lambda attention, x: attention(x, x, use_causal_mask=True),
        *[(5, 8)],
        draws=(1,),
    ),
    "masked LSTM": rows(lambda: masked(layers.LSTM(4)), own.integers(5)),
    "stateful GRU": mixing(lambda: layers.GRU(4, stateful=True), (5, 3)),
    "activity regularizer": rows(
        lambda: layers.Dense(3, activity_regularizer="l2"), losses=(MEAN,)
    ),
    "kernel regularizer": rows(lambda: layers.Dense(3, kernel_regularizer="l2")),
    AT_NIGHT: rows(lambda: transformer(2, 0.1), own.integers(5), draws=(1,) * 4),
}


def dense(use: Any, inner: Any = dense6) -> RowCase:
    """A layer of Keras, which is one operation of a proof, in the code of users."""
    return rows(lambda: own.with_loss(use, inner(), 0.0), losses=(MEAN,))


def embeddings(*more: Any) -> keras.Model:
    return keras.Sequential([layers.Embedding(4, 6, mask_zero=True), *more])


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
    "nested layer": dense(lambda f, x: f(f(x)), lambda: own.sequential(dense6("tanh"))),
    "layer of a table": dense(lambda layer, x: x + ops.sum(layer(TABLE))),
    "layer of stopped rows": dense(lambda layer, x: layer(ops.stop_gradient(x))),
    "layer of flattened rows": dense(
        lambda f, x: ops.reshape(f(ops.reshape(x, (-1, 3))), ops.shape(x)), dense3
    ),
    "layer of a list": dense(lambda add, x: add([x, ops.ones_like(x)]), layers.Add),
    **{n: held(dense6, use, problem=True) for n, use in _MIXING.items()},
    "layers with a mask that draw": held(
        *(lambda: embeddings(layers.LSTM(5), layers.Dropout(0.5)), training, IDS),
        draws=(1,),
    ),
    "layer with statistics": held(layers.BatchNormalization, training, **PAIR),
    "sum of masked rows": held(
        embeddings, lambda model, x: ops.sum(layers.Masking()(model(x)), 1), IDS
    ),
    # Proved by its operations.
    "rows of flattened axes": held(
        dense6, lambda f, x: f(ops.reshape(x, (-1, 6))), (3, 6), outputs=own.multiple(3)
    ),
}


def loop_over_time(x: Any) -> Any:
    return ops.fori_loop(0, 5, lambda i, h: h * 0.5 + ops.take(x, i, 1), x[:, 0])


FUNCTIONS = {
    "transposed twice": lambda x: ops.transpose(ops.cumsum(ops.transpose(x), axis=0)),
    "x * rows / rows": lambda x: x * own.row_count(x) / own.row_count(x),
    "stack and take": lambda x: ops.stack([x, x * x], axis=0)[1],
    "zeros summed": lambda x: x + ops.sum(ops.ones((ops.shape(x)[0], 6))) * 0.0,
    "gradient clipped by row": CLIPPED,
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
    "a table": function(lambda i, t: ops.take(t, i, 0), IDS, own.whole(9, 4)),
    "argument of as many": mixing_function(lambda x, t: x + t, (6,), AS_MANY),
    "x @ transpose(t)": mixing_function(lambda x, t: x @ ops.transpose(t), (6,), (6,)),
    # The zeros of its gradient are filled for all rows, and constants for parts.
    "clip of many columns": function(lambda x: ops.clip(x, -1, 1), (200,)),
    "loop over time": function(loop_over_time, (5, 3)),
    "codebook": rows(lambda: own.Own(own.codebook, codes=(5, 6)), losses=(MEAN, MEAN)),
    "sampling": rows(lambda: sampled(ops.shape), draws=(1,)),
    "one draw for all rows": rows(lambda: sampled(lambda x: (1, 6)), draws=(0,)),
    "capacity": mixing(lambda: own.Own(own.experts, router=(6, 2), experts=(2, 6, 6))),
    # Zero at first, with as many entries as the batch.
    "weight with rows": mixing(lambda: own.Own(lambda o, x: x + o.table, table=ZEROS)),
}
if keras.backend.backend() != "tensorflow":  # It takes no arrays as indices.
    OPERATIONS["an entry by the number of its row"] = mixing_function(
        lambda x: x[np.arange(x.shape[0]), np.arange(x.shape[0])], (200,)
    )


def padded_sum(x: Any, **options: Any) -> Any:
    return ops.sum(ops.pad(ops.sum(x, 0), ((0, 1),), **options))


def crossentropy(x: Any) -> Any:
    return ops.mean(ops.sparse_categorical_crossentropy(ops.argmax(x, -1), x, True))


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


def scaled(function: own.Function) -> own.Own:
    return own.Own(function, scale={"shape": (6,), "initializer": "ones"})


def weight_loss(layer: own.Own, inputs: Any) -> Any:
    layer.add_loss(ops.sum(ops.square(layer.scale)))
    return inputs * layer.scale


def of_weight(gradient: own.Function) -> own.Make:
    multiply = own.with_gradient(gradient)
    return lambda: scaled(lambda layer, x: x * multiply(layer.scale))


#: Of weights, and of what is assigned.
WEIGHTS = {
    "counter": rows(lambda: own.tracked(lambda v, x: v + 1), updates=(SAME,)),
    "moving average of a mean": rows(
        lambda: own.tracked(lambda v, x: 0.9 * v + 0.1 * ops.mean(x)), updates=(MEAN,)
    ),
    "rows counted": mixing(lambda: own.tracked(lambda v, x: v + own.row_count(x))),
    "rows kept": mixing(lambda: own.tracked(lambda v, x: x, (own.BATCH, 6))),
    "loss of weights": rows(lambda: scaled(weight_loss), losses=(SAME,)),
    "clipped gradient": mixing(of_weight(lambda w, g: g / (1e6 + ops.norm(g)))),
    "scaled gradient": rows(of_weight(lambda w, g: 3.0 * g)),
    "constant gradient": mixing(of_weight(lambda w, g: ops.ones_like(g))),
}
CASES: dict[str, RowCase] = {
    **KERAS_LAYERS,
    **KNOWN_LAYERS,
    **OPERATIONS,
    **{name: loss(*each) for name, each in LOSSES.items()},
    **WEIGHTS,
}

_NIGHTLY = {AT_NIGHT: [pytest.mark.nightly]}
PARAMETERS = [pytest.param(name, marks=_NIGHTLY.get(name, [])) for name in CASES]
#: Parts of these need the statistics of all replicas.
COLLECTIVES = ("batch norm of images", "batch norm and a loss", "layer with statistics")
#: Those of a program for any number of rows, one of each kind of rules.
ANY_ROWS = (
    *("conv2d dilated", "masked LSTM", "x * rows / rows", "repeated rows"),
    *("cumsum along rows", "capacity", "x / rows", "x / <= 64 rows"),
    *("sum / rows", "moving average of a mean", "loop over time"),
)


@pytest.mark.one_backend("torch", "tensorflow")
@pytest.mark.slow(seconds=6)
@own.needs_split
@pytest.mark.parametrize("name", PARAMETERS)
def test_placements(name: str) -> None:
    case = CASES[name]
    layer, values = own.built(case)
    proof = own.proof_of(layer, values, case.has_rows)
    if case.problem:
        assert proof.problem is not None
        return
    assert proof.problem is None
    assert tuple(proof.outputs) == case.outputs
    assert tuple(proof.losses) == case.losses
    variables = [id(v) for v in layer.variables if "seed" not in v.path]
    updates = tuple(proof.updates[v] for v in variables if v in proof.updates)
    assert updates == case.updates
    assert tuple(proof.draws) == case.draws
    if any(case.draws) or name in COLLECTIVES:
        return
    draws = np.random.default_rng(23)
    later = [argument.value(own.BATCH, draws) for argument in case.arguments]
    own.assert_parts_equal(layer, later, proof, case.has_rows)


@pytest.mark.one_backend("tensorflow")
@own.of_tensorflow
@pytest.mark.parametrize("name", ANY_ROWS)
def test_placements_for_any_number_of_rows(name: str) -> None:
    case = CASES[name]
    layer, values = own.built(case)
    proof = own.proof_of(layer, values, case.has_rows, sizes=())
    assert (proof.problem is not None) == case.problem
    if not case.problem:
        assert tuple(proof.outputs) == case.outputs
        assert tuple(proof.losses) == case.losses


MATRIX = own.normal(6, 6, seed=2)
BY_ROWS: list[own.Function] = [
    lambda x: ops.relu(x) + 0.1 * x,
    lambda x: x - ops.mean(x, -1, keepdims=True),
    lambda x: ops.cumsum(x, 1),
    lambda x: ops.sort(x, 1),
    lambda x: ops.matmul(x, MATRIX),
    lambda x: ops.reshape(ops.tanh(ops.reshape(x, (-1, 3))), (-1, 6)),
    lambda x: ops.transpose(ops.cumsum(ops.transpose(x), 0)),
    lambda x: ops.pad(x, ((0, 0), (1, 0)))[:, 1:],
    lambda x: ops.take_along_axis(x, ops.argsort(x, axis=1), axis=1),
    lambda x: ops.take(ops.convert_to_tensor(MATRIX), ops.argmax(x, 1), axis=0) * x,
    lambda x: ops.einsum("bi,bj->bij", x, x)[:, 0],
    lambda x: ops.concatenate([x[:, :3], x[:, 3:] * 2], 1),
    lambda x: ops.stack([x, x * x], 0)[1],
    lambda x: x / ops.norm(x, axis=1, keepdims=True),
    CLIPPED,
]
MIXING: list[own.Function] = [
    lambda x: x - ops.mean(x),
    lambda x: ops.cumsum(x, 0),
    lambda x: ops.flip(x, 0),
    lambda x: x + x[:1],
    lambda x: x * float(x.shape[0]),
    lambda x: ops.reshape(ops.transpose(x), (-1, 6)),
    lambda x: x + ops.tanh(ops.sum(x)) * 0.0,
    lambda x: ops.matmul(ops.softmax(ops.matmul(x, ops.transpose(x))), x),
    lambda x: ops.sort(x, 0),
    lambda x: x + ops.cast(ops.arange(x.shape[0])[:, None], own.FLOAT),
    lambda x: x / ops.cast(ops.max(ops.argmax(x, 1)) + 7, "float32"),
    lambda x: ops.roll(ops.reshape(x, (-1, 1)), 1, 0) * ops.ones((1, 6)),
    own.with_gradient(lambda x, g: g / ops.maximum(ops.norm(g), 1e6)),
]
#: With whether they can be split.
LOSSES_OF_PROGRAMS: list[tuple[own.Function, bool]] = [
    (lambda x: ops.sum(x), True),
    (lambda x: ops.mean(ops.square(x)), True),
    (lambda x: ops.sum(ops.mean(x, 0)), True),
    (lambda x: ops.mean(ops.sum(x, 1)) + 2, True),
    (lambda x: ops.sum(x) / ops.cast(ops.size(x), "float32"), True),
    (lambda x: ops.sum(ops.square(ops.sum(x, 0))), False),
    (lambda x: 0.0 * ops.max(x), False),
    (lambda x: ops.sqrt(ops.mean(x * x)), False),
]


def program(seed: int) -> tuple[own.Own, bool]:
    draws = random.Random(seed)
    functions = draws.choices(BY_ROWS, k=draws.randint(1, 4))
    mixes = draws.random() < 0.4
    if mixes:
        functions.insert(draws.randint(0, len(functions)), draws.choice(MIXING))
    loss, is_split = None, True
    if draws.random() < 0.5:
        loss, is_split = draws.choice(LOSSES_OF_PROGRAMS)

    def run(layer: own.Own, x: Any) -> Any:
        for each in functions:
            x = each(x)
        outputs = ops.matmul(x, layer.matrix)
        if loss is not None:
            layer.add_loss(loss(outputs))
        return outputs

    matrix = {"shape": (6, 6), "initializer": "random_normal"}
    return own.Own(run, matrix=matrix), not mixes and is_split


@own.needs_split
@pytest.mark.parametrize("sizes", [own.SIZES, (7, 1)], ids=str)
@pytest.mark.parametrize("seed", range(16))
def test_random_programs(seed: int, sizes: tuple[int, int]) -> None:
    keras.utils.set_random_seed(seed)
    layer, is_by_rows = program(seed)
    values = [own.normal(8, 6, seed=seed) + 0.2]
    layer(ops.convert_to_tensor(values[0]))
    proof = own.proof_of(layer, values, sizes=sizes)
    assert (proof.problem is None) == is_by_rows
    if is_by_rows:
        own.assert_parts_equal(layer, values, proof, sizes=sizes)
