"""Cases of operations: what goes through rows, and what needs the batch."""

from __future__ import annotations

from typing import Any

import numpy as np
from keras import layers, ops

from keras_strategies.rows.row_placements import MEAN, ROWS, SAME, SUM
from row_proofs import case_layers as own
from row_proofs.case_layers import Apply, Around
from row_proofs.row_case import (
    BATCH,
    FLOAT,
    function,
    ids,
    mixing,
    mixing_function,
    multiple,
    row_count,
    rows,
    whole,
)


def _table(*shape: int) -> Any:
    return np.random.default_rng(1).normal(size=shape).astype(FLOAT)


def _columns(x: Any, row: int = 0) -> tuple[Any, Any, Any]:
    """Arguments of `slice_update`, which has no gradient on TensorFlow."""
    given = ops.stop_gradient(x)
    return given, (row, 1), 2.0 * given[row:, :3]


def _ctc_loss(labels: Any, logits: Any) -> Any:
    ones = ops.ones_like(labels[:, 0])
    return ops.ctc_loss(labels + 1, logits, 2 * ones, 8 * ones)


TABLE, EYE, BIG = _table(BATCH, 6), _table(6, 4), _table(128, 6)
ROW_OPERATIONS = [
    function("x - mean of its row", lambda x: x - ops.mean(x, -1, keepdims=True), (6,)),
    function("cumsum along columns", lambda x: ops.cumsum(x, axis=1), (6,)),
    function("roll along columns", lambda x: ops.roll(x, 1, axis=1), (6,)),
    function("columns", lambda x: x[:, :2], (6,)),
    function("norm of rows", lambda x: x / ops.norm(x, axis=-1, keepdims=True), (6,)),
    function("sort along columns", lambda x: ops.sort(x, axis=1), (6,)),
    function("top_k", lambda x: ops.top_k(x, 2)[0], (6,)),
    function("argmax one-hot", lambda x: x * ops.one_hot(ops.argmax(x, -1), 6), (6,)),
    function(
        "constant that is compared",
        lambda x: x * ops.cast(ops.linspace(-1.0, 1.0, 6) >= x, FLOAT),
        (6,),
    ),
    function("columns by number", lambda x: ops.take(x, [0, 2], axis=1), (6,)),
    function(
        "take along axis",
        lambda x: ops.take_along_axis(x, ops.argsort(x, axis=1), axis=1),
        (6,),
    ),
    function("matmul with a constant", lambda x: ops.matmul(x, EYE), (6,)),
    function(
        "two rows for each",
        lambda x: ops.reshape(x, (-1, 3)),
        (6,),
        outputs=multiple(2),
    ),
    function(
        "reshaped there and back",
        lambda x: ops.reshape(ops.reshape(x, (-1, 3)) * 2, (-1, 6)),
        (6,),
    ),
    function(
        "repeated rows", lambda x: ops.repeat(x, 3, axis=0), (6,), outputs=multiple(3)
    ),
    function(
        "transposed there and back",
        lambda x: ops.transpose(ops.cumsum(ops.transpose(x), axis=0)),
        (6,),
    ),
    function("x * rows / rows", lambda x: x * row_count(x) / row_count(x), (6,)),
    function(
        "where", lambda x: ops.where(ops.sum(x, -1, keepdims=True) > 0, x, 0.0), (6,)
    ),
    function(
        "soft routing", lambda x: ops.einsum("be,ed->bd", ops.softmax(x), EYE), (6,)
    ),
    function(
        "top_k routing",
        lambda x: ops.matmul(
            ops.take_along_axis(x, ops.top_k(x, 2)[1], axis=1), EYE[:2]
        ),
        (6,),
    ),
    function("outer product", lambda x: ops.einsum("bi,bj->bij", x, x), (6,)),
    function("stack", lambda x: ops.stack([x, x * x], axis=1), (6,)),
    function("stack and take", lambda x: ops.stack([x, x * x], axis=0)[1], (6,)),
    function("split columns", lambda x: ops.split(x, 2, axis=1)[1], (6,)),
    function("pad columns", lambda x: ops.pad(x, ((0, 0), (1, 0))), (6,)),
    function("flip columns", lambda x: ops.flip(x, axis=1), (6,)),
    function("logsumexp", lambda x: ops.logsumexp(x, -1), (6,)),
    function(
        "activations",
        lambda x: (
            ops.silu(ops.gelu(x, approximate=False))
            + ops.softplus(x) * ops.tanh(x)
            + ops.hard_sigmoid(x)
            + ops.elu(x)
            + ops.leaky_relu(x)
            + ops.relu6(x)
        ),
        (6,),
    ),
    function(
        "signs",
        lambda x: ops.where(ops.isnan(x), 0.0, x) + ops.clip(x, 0, 1) + ops.sign(x),
        (6,),
    ),
    function("real Fourier transform", lambda x: ops.rfft(x)[0], (8,)),
    function("Fourier transform", lambda x: ops.fft((x, x))[1], (8,)),
    function("patches", lambda x: ops.image.extract_patches(x, 2), (6, 6, 3)),
    function("zeros added", lambda x: x + ops.zeros_like(x), (6,)),
    function("ones added", lambda x: x + ops.ones_like(x), (6,)),
    function("linspace added", lambda x: x + ops.linspace(0.0, 1.0, 6), (6,)),
    function("column numbers", lambda x: x + ops.cast(ops.arange(6), FLOAT), (6,)),
    function(
        "two outputs",
        lambda x: (x + 1, {"b": ops.sum(x, -1)}),
        (6,),
        outputs=(ROWS, ROWS),
    ),
    function(
        "output without rows",
        lambda x: (x, ops.ones((3,)) * 2),
        (6,),
        outputs=(ROWS, SAME),
    ),
    function("output of a sum", lambda x: (x, ops.sum(x)), (6,), outputs=(ROWS, SUM)),
    function(
        "output of a mean", lambda x: (x, ops.mean(x)), (6,), outputs=(ROWS, MEAN)
    ),
    function(
        "output of a column mean", lambda x: ops.mean(x, 0), (6,), outputs=(MEAN,)
    ),
    function("Python output", lambda x: (x, 3.0), (6,), outputs=(ROWS, None)),
    function("stop gradient", lambda x: x * ops.stop_gradient(x), (6,)),
    function("int output", lambda x: ops.argmax(x, -1), (6,)),
    function("bool output", lambda x: x > 0, (6,)),
    function("two arguments", lambda x, y: ops.concatenate([x, y], -1), (6,), (3,)),
    function("argument without rows", lambda x, t: x * t, (6,), whole(6)),
    function(
        "matmul with an argument", lambda x, t: ops.matmul(x, t), (6,), whole(6, 3)
    ),
    function(
        "argument as a table", lambda i, t: ops.take(t, i, axis=0), ids(3), whole(9, 4)
    ),
    # The zeros of its gradient are filled for all rows, and constants for parts.
    function("clip of many columns", lambda x: ops.clip(x, -1, 1), (200,)),
    function("quantiles of rows", lambda x: ops.quantile(x, 0.3, axis=1), (6,)),
    function("maximum without NaN", lambda x: ops.nanmax(x, axis=1), (6,)),
    function("cross product", lambda x, y: ops.cross(x, y, axis=-1), (3,), (3,)),
    function(
        "loss of a cross product",
        lambda x: (x, ops.mean(ops.cross(x, 2 * ops.flip(x, 1), axis=-1))),
        (3,),
        outputs=(ROWS, MEAN),
    ),
    function(
        "least squares of columns",
        lambda x: ops.transpose(ops.lstsq(EYE.T, ops.transpose(x))),
        (4,),
    ),
    function("short-time Fourier transform", lambda x: ops.stft(x, 8, 4, 8)[0], (32,)),
    function(
        "Fourier transform there and back",
        lambda x: ops.istft(ops.stft(x, 8, 4, 8), 8, 4, 8),
        (32,),
    ),
    function("bits", lambda x: ops.view(x, "int32"), (6,)),
    function(
        "multiples",
        lambda x: x * ops.floor_divide(ops.stop_gradient(x), 0.3),
        (6,),
    ),
    function(
        "step", lambda x: x * ops.heaviside(ops.stop_gradient(x) - 1e6, 0.5), (6,)
    ),
    function(
        "columns replaced",
        lambda x: x + ops.slice_update(*_columns(x)),
        (6,),
    ),
    function(
        "one of two by number",
        lambda x: ops.switch(1, [lambda y: y - ops.mean(y), lambda y: 2.0 * y], x),
        (6,),
    ),
    rows(
        "CTC loss",
        lambda: Apply(_ctc_loss),
        ids(2),
        (8, 6),
        only="torch",
    ),
    rows("codebook", lambda: own.Codebook(), (6,), losses=(MEAN, MEAN)),
    rows(
        "sampling",
        lambda: own.Sampled(lambda x: ops.shape(x)),
        (6,),
        draws=True,
    ),
    rows("one draw for all rows", lambda: own.Sampled(lambda x: (1, 6)), (6,)),
]


MIXING_OPERATIONS = [
    mixing_function("x - max", lambda x: x - ops.max(x, axis=0), (6,)),
    mixing_function("x - mean", lambda x: x - ops.mean(x), (6,)),
    mixing_function("softmax of rows", lambda x: ops.softmax(x, axis=0), (6,)),
    mixing_function("cumsum along rows", lambda x: ops.cumsum(x, axis=0), (6,)),
    mixing_function("flip of rows", lambda x: ops.flip(x, axis=0), (6,)),
    mixing_function("roll of rows", lambda x: ops.roll(x, 1, axis=0), (6,)),
    mixing_function("sort of rows", lambda x: ops.sort(x, axis=0), (6,)),
    mixing_function("first row added", lambda x: x + x[:1], (6,)),
    mixing_function("all but the last row", lambda x: x[:-1], (6,)),
    mixing_function("reshape across rows", lambda x: ops.reshape(x, (2, -1)), (6,)),
    mixing_function("transposed", lambda x: ops.transpose(x), (6,)),
    mixing_function("Gram matrix", lambda x: ops.matmul(x, ops.transpose(x)), (6,)),
    mixing_function(
        "attention over the batch",
        lambda x: ops.matmul(ops.softmax(ops.matmul(x, ops.transpose(x))), x),
        (6,),
    ),
    mixing_function("Gram by einsum", lambda x: ops.einsum("bi,ci->bc", x, x), (6,)),
    mixing_function(
        "clip by the batch norm",
        lambda x: x / ops.maximum(ops.norm(x), 1e6),
        (6,),
    ),
    mixing("capacity", lambda: own.Capacity(100), (6,)),
    mixing_function("rows by number", lambda x: ops.take(x, [0, 2], axis=0), (6,)),
    mixing_function(
        "row numbers",
        lambda x: x * ops.cast(ops.arange(ops.shape(x)[0]), FLOAT)[:, None],
        (6,),
    ),
    mixing_function("constant with rows added", lambda x: x + TABLE, (6,)),
    mixing_function(
        "table up to the batch",
        lambda x: x + ops.convert_to_tensor(BIG)[: ops.shape(x)[0]],
        (6,),
    ),
    function(
        "zeros with rows summed",
        lambda x: x + ops.sum(ops.ones((ops.shape(x)[0], 6))) * 0.0,
        (6,),
    ),
    mixing("weight with rows", lambda: own.ZeroTable(BATCH), (6,)),
    mixing_function(
        "argument without rows but as many", lambda x, t: x + t, (6,), whole(BATCH, 6)
    ),
    mixing_function("constant times rows", lambda x: ops.matmul(TABLE.T, x), (6,)),
    mixing_function("x / rows", lambda x: x / row_count(x), (6,)),
    mixing_function("x / rows in Python", lambda x: x / float(x.shape[0]), (6,)),
    mixing_function(
        "branch on rows in Python", lambda x: x if x.shape[0] > 6 else 2 * x, (6,)
    ),
    mixing_function("rows as an output", lambda x: (x, x.shape[0]), (6,)),
    mixing_function(
        "x / at most 64 rows",
        lambda x: x / ops.cast(ops.minimum(ops.shape(x)[0], 64), FLOAT),
        (6,),
    ),
    mixing_function(
        "as many columns as rows",
        lambda x: x * ops.sum(x[:, : ops.shape(x)[0]], -1, keepdims=True),
        (9,),
    ),
    mixing_function("roll by rows", lambda x: ops.roll(x, x.shape[0], axis=1), (6,)),
    mixing_function("mean of ones", lambda x: x + ops.sum(ops.ones_like(x)), (6,)),
    mixing_function(
        "contrastive",
        lambda x: ops.logsumexp(ops.matmul(x, ops.transpose(x)), 1, keepdims=True) + x,
        (6,),
    ),
    mixing("zero gate of the mean", lambda: own.ZeroGate(), (6,)),
    mixing_function("variance of the batch", lambda x: x * ops.var(x, axis=0), (6,)),
    mixing_function(
        "rank", lambda x: x * ops.cast(ops.argsort(x, axis=0), FLOAT), (6,)
    ),
    mixing_function("any row", lambda x: ops.where(ops.any(x > 1e6), 0.0, x), (6,)),
    mixing_function("rows swapped", lambda x: ops.concatenate([x[2:], x[:2]]), (6,)),
    mixing_function(
        "columns of flat rows",
        lambda x: ops.roll(ops.reshape(x, (-1,)), 1)[:, None],
        (6,),
    ),
    mixing_function(
        "next row", lambda x: x + 0.0 * ops.pad(x, ((0, 1), (0, 0)))[1:], (6,)
    ),
    mixing_function(
        "stacked before the rows",
        lambda x: ops.reshape(ops.stack([x, 2 * x]), (-1, 6)),
        (6,),
    ),
    mixing_function(
        "matmul with an argument of rows",
        lambda x, t: ops.matmul(x, ops.transpose(t)),
        (6,),
        (6,),
    ),
    mixing_function("quantiles of columns", lambda x: ops.quantile(x, 0.3, 0), (6,)),
    mixing_function("largest of columns", lambda x: x - ops.nanmax(x, axis=0), (6,)),
    mixing_function(
        "cross product with a constant of rows",
        lambda x: ops.cross(x, TABLE[:, :3], axis=-1),
        (3,),
    ),
    mixing_function(
        "least squares of rows",
        lambda x: x + 0.0 * ops.sum(ops.lstsq(x, TABLE)),
        (3,),
    ),
    mixing_function(
        "Fourier transform along rows",
        lambda x: ops.stft(ops.transpose(x), 3, 1, 4)[0],
        (6,),
    ),
    mixing_function("bits of a sum", lambda x: ops.view(ops.sum(x, 0), "int32"), (6,)),
    mixing_function(
        "multiples of the rows",
        lambda x: x * ops.floor_divide(ops.stop_gradient(x), row_count(x)),
        (6,),
    ),
    mixing_function(
        "a row replaced",
        lambda x: x + 0.0 * ops.slice_update(*_columns(x, row=1)),
        (6,),
    ),
    mixing_function(
        "one of two by a statistic",
        lambda x: ops.switch(
            ops.cast(ops.mean(x) > -1e6, "int32"), [lambda y: y, lambda y: 2.0 * y], x
        ),
        (6,),
    ),
    mixing("shuffled rows", lambda: own.Shuffled(), (6,)),
    mixing("mixup", lambda: Around(layers.MixUp(), lambda x: x), (6, 6, 3)),
    mixing("softmax layer over rows", lambda: layers.Softmax(axis=0), (6,)),
]
