"""Layer calls and the placements of their results, for all backends.

Values hide what the operations do: weights are zero, capacities are not reached, losses
have a factor of zero. `problem=True` expects that the call is not split.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from keras import layers, ops

from keras_strategies.runtime.row_proofs.row_placements import (
    MEAN,
    ROWS,
    SAME,
    SUM,
    RowKind,
    RowPlacement,
)
from row_proofs import case_layers as own
from row_proofs.case_layers import AddLoss, Apply, Around, Tracked

#: Rows of the batch, and of each replica.
BATCH = 8
SIZES = (5, 3)
FLOAT = "float32"


@dataclass(frozen=True)
class Argument:
    """A positional argument of the call: its shape without rows, dtype, placement."""

    shape: tuple[int, ...]
    dtype: str = FLOAT
    has_rows: bool = True

    def value(self, rows: int, random: np.random.Generator) -> Any:
        shape = (rows, *self.shape) if self.has_rows else self.shape
        if self.dtype == FLOAT:
            return random.normal(size=shape).astype(FLOAT)
        if self.dtype == "string":
            return random.choice(["a", "b", "z"], shape).astype(object)
        if self.dtype == "bool":
            return random.integers(0, 2, shape).astype(bool)
        return random.integers(0, 4, shape).astype(self.dtype)


@dataclass(frozen=True)
class RowCase:
    """A layer call with the expected result of its proof.

    Args:
        name: str.
        make: returns the layer, not built.
        arguments: the arguments of the call.
        outputs: placements of the outputs.
        losses: placements of the losses that the call adds.
        updates: placements of the values that the call assigns to weights, in the
            order of the layer's variables; without the states of seeds.
        problem: bool, whether the call cannot be split.
        draws: bool, whether random numbers of the rows are drawn.
        only: str, the one backend that can call the layer; empty for all.
    """

    name: str
    make: Callable[[], Any]
    arguments: tuple[Argument, ...]
    outputs: tuple[RowPlacement | None, ...] = (ROWS,)
    losses: tuple[RowPlacement, ...] = ()
    updates: tuple[RowPlacement, ...] = ()
    problem: bool = False
    draws: bool = False
    only: str = ""


def rows(name: str, make: Callable[[], Any], *shapes: Any, **expected: Any) -> RowCase:
    return RowCase(name, make, tuple(map(_argument, shapes)), **expected)


def mixing(name: str, make: Callable[[], Any], *shapes: Any, only: str = "") -> RowCase:
    arguments = tuple(map(_argument, shapes))
    return RowCase(name, make, arguments, problem=True, only=only)


def _argument(shape: Any) -> Argument:
    return shape if isinstance(shape, Argument) else Argument(shape)


def function(
    name: str, apply: Callable[..., Any], *shapes: Any, **expected: Any
) -> RowCase:
    return rows(name, lambda: Apply(apply), *shapes, **expected)


def mixing_function(name: str, apply: Callable[..., Any], *shapes: Any) -> RowCase:
    return mixing(name, lambda: Apply(apply), *shapes)


def loss(name: str, of: Callable[[Any], Any], kind: RowPlacement) -> RowCase:
    return rows(name, lambda: AddLoss(of), (6,), losses=(kind,))


def mixing_loss(name: str, of: Callable[[Any], Any]) -> RowCase:
    return mixing(name, lambda: AddLoss(of), (6,))


def multiple(count: int) -> tuple[RowPlacement]:
    return (RowPlacement(RowKind.ROWS, multiple=count),)


def ids(*shape: int) -> Argument:
    return Argument(shape, "int32")


def whole(*shape: int) -> Argument:
    """An argument without rows."""
    return Argument(shape, has_rows=False)


def row_count(x: Any) -> Any:
    return ops.cast(ops.shape(x)[0], FLOAT)


def positive(x: Any) -> Any:
    return ops.cast(x > 0, FLOAT)


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

KERAS_LAYERS = [
    rows("dense", lambda: layers.Dense(5, "relu"), (6,)),
    rows("dense 3-D", lambda: layers.Dense(5, "gelu"), (3, 6)),
    rows("layer norm", lambda: layers.LayerNormalization(), (6,)),
    rows("layer norm 3-D", lambda: layers.LayerNormalization(), (3, 6)),
    rows("rms norm", lambda: layers.RMSNormalization(), (6,)),
    rows("unit norm", lambda: layers.UnitNormalization(), (6,)),
    rows("group norm", lambda: layers.GroupNormalization(2), (5, 5, 6)),
    rows("batch norm", lambda: layers.BatchNormalization(), (6,), updates=(SAME, SAME)),
    rows(
        "batch norm of images",
        lambda: layers.BatchNormalization(),
        (5, 5, 3),
        updates=(SAME, SAME),
    ),
    rows(
        "batch norm and a loss",
        lambda: own.Regularized(),
        (6,),
        losses=(MEAN,),
        updates=(SAME, SAME),
    ),
    rows(
        "spectral norm",
        lambda: layers.SpectralNormalization(layers.Dense(4)),
        (6,),
        updates=(SAME, SAME),
    ),
    rows("dropout", lambda: layers.Dropout(0.3), (6,), draws=True),
    rows("spatial dropout", lambda: layers.SpatialDropout1D(0.3), (4, 6), draws=True),
    rows(
        "dropout shared by the batch",
        lambda: layers.Dropout(0.3, noise_shape=(1, 6)),
        (6,),
    ),
    rows("gaussian noise", lambda: layers.GaussianNoise(0.3), (6,), draws=True),
    rows("alpha dropout", lambda: layers.AlphaDropout(0.3), (6,), draws=True),
    rows("embedding", lambda: layers.Embedding(9, 4), ids(6)),
    rows("reversible embedding", lambda: layers.ReversibleEmbedding(9, 4), ids(6)),
    rows("conv2d", lambda: layers.Conv2D(4, 3, padding="same"), (7, 7, 3)),
    rows("conv2d dilated", lambda: layers.Conv2D(4, 3, dilation_rate=2), (9, 9, 3)),
    rows("conv2d in groups", lambda: layers.Conv2D(4, 3, groups=2), (7, 7, 4)),
    rows("separable conv", lambda: layers.SeparableConv2D(4, 3), (7, 7, 3)),
    rows("separable conv 1-D", lambda: layers.SeparableConv1D(4, 3), (6, 3)),
    rows("conv3d", lambda: layers.Conv3D(4, 2), (4, 4, 4, 2)),
    rows("depthwise conv", lambda: layers.DepthwiseConv2D(3), (7, 7, 3)),
    rows("causal conv", lambda: layers.Conv1D(4, 3, padding="causal"), (7, 3)),
    rows(
        "causal dilated conv",
        lambda: layers.Conv1D(4, 3, padding="causal", dilation_rate=2),
        (9, 3),
    ),
    rows("conv transpose", lambda: layers.Conv2DTranspose(4, 3, strides=2), (5, 5, 3)),
    rows("conv transpose 1-D", lambda: layers.Conv1DTranspose(4, 3), (6, 3)),
    rows("max pool", lambda: layers.MaxPooling2D(2), (8, 8, 3)),
    rows("average pool", lambda: layers.AveragePooling2D(2), (8, 8, 3)),
    rows("max pool 3-D", lambda: layers.MaxPooling3D(2), (4, 4, 4, 2)),
    rows("average pool 1-D", lambda: layers.AveragePooling1D(2), (4, 3)),
    rows("global average", lambda: layers.GlobalAveragePooling2D(), (7, 7, 3)),
    rows("global max", lambda: layers.GlobalMaxPooling1D(), (7, 3)),
    rows("flatten", lambda: layers.Flatten(), (5, 3)),
    rows("reshape layer", lambda: layers.Reshape((3, 5)), (5, 3)),
    rows("permute", lambda: layers.Permute((2, 1)), (5, 3)),
    rows("causal attention", lambda: own.SelfAttention(), (5, 8)),
    rows(
        "attention dropout",
        lambda: own.SelfAttention(dropout=0.2),
        (5, 8),
        draws=True,
    ),
    rows(
        "dot-product attention",
        lambda: Around(layers.Attention(), lambda x: [x, x]),
        (5, 3),
    ),
    rows(
        "additive attention",
        lambda: Around(layers.AdditiveAttention(), lambda x: [x, x]),
        (5, 3),
    ),
    rows(
        "masked attention",
        lambda: own.masked(lambda: own.SelfAttention()),
        ids(5),
    ),
    rows("LSTM", lambda: layers.LSTM(4), (5, 3)),
    rows(
        "LSTM with dropout",
        lambda: layers.LSTM(4, dropout=0.2, recurrent_dropout=0.2),
        (5, 3),
        draws=True,
    ),
    rows("masked LSTM", lambda: own.masked(lambda: layers.LSTM(4)), ids(5)),
    rows("GRU", lambda: layers.GRU(4, return_sequences=True), (5, 3)),
    rows("unrolled GRU", lambda: layers.GRU(4, unroll=True), (5, 3)),
    rows("simple RNN", lambda: layers.SimpleRNN(4), (5, 3)),
    rows(
        "two cells",
        lambda: layers.RNN([layers.LSTMCell(4), layers.LSTMCell(3)]),
        (5, 3),
    ),
    rows(
        "bidirectional",
        lambda: layers.Bidirectional(layers.GRU(4, return_sequences=True)),
        (5, 3),
    ),
    rows(
        "masked bidirectional",
        lambda: own.masked(lambda: layers.Bidirectional(layers.GRU(4))),
        ids(5),
    ),
    mixing("stateful GRU", lambda: layers.GRU(4, stateful=True), (5, 3)),
    rows("ConvLSTM", lambda: layers.ConvLSTM1D(4, 3), (4, 6, 2)),
    rows("time distributed", lambda: layers.TimeDistributed(layers.Dense(4)), (5, 3)),
    rows("einsum dense", lambda: layers.EinsumDense("abc,cd->abd", (None, 4)), (5, 3)),
    rows(
        "einsum dense with heads",
        lambda: layers.EinsumDense("abc,cde->abde", (None, 2, 4), bias_axes="de"),
        (5, 3),
    ),
    rows("softmax layer", lambda: layers.Softmax(), (6,)),
    rows("upsampling", lambda: layers.UpSampling2D(2), (4, 4, 3)),
    rows(
        "bilinear upsampling",
        lambda: layers.UpSampling2D(2, interpolation="bilinear"),
        (4, 4, 3),
    ),
    rows("zero padding", lambda: layers.ZeroPadding2D(1), (4, 4, 3)),
    rows("cropping", lambda: layers.Cropping2D(1), (5, 5, 3)),
    rows("repeat vector", lambda: layers.RepeatVector(3), (5,)),
    rows(
        "concatenate", lambda: Around(layers.Concatenate(), lambda x: [x, 2 * x]), (6,)
    ),
    mixing(
        "concatenate rows",
        lambda: Around(layers.Concatenate(axis=0), lambda x: [x, 2 * x]),
        (6,),
    ),
    rows("dot", lambda: Around(layers.Dot(1), lambda x: [x, 2 * x]), (6,)),
    rows("PReLU", lambda: layers.PReLU(), (6,)),
    rows("normalization", lambda: layers.Normalization(mean=0.0, variance=1.0), (6,)),
    rows("resizing", lambda: layers.Resizing(4, 4), (6, 6, 3)),
    rows("category encoding", lambda: layers.CategoryEncoding(5, "multi_hot"), ids(6)),
    rows(
        "activity regularizer",
        lambda: layers.Dense(3, activity_regularizer="l2"),
        (6,),
        losses=(MEAN,),
    ),
    rows("kernel regularizer", lambda: layers.Dense(3, kernel_regularizer="l2"), (6,)),
    rows("transformer", lambda: own.transformer(), ids(5)),
    rows(
        "transformer of two blocks with dropout",
        lambda: own.transformer(2, rate=0.1),
        ids(5),
        draws=True,
    ),
]

ROW_OPERATIONS = [
    function("x - mean of its row", lambda x: x - ops.mean(x, -1, keepdims=True), (6,)),
    function("cumsum along columns", lambda x: ops.cumsum(x, axis=1), (6,)),
    function("roll along columns", lambda x: ops.roll(x, 1, axis=1), (6,)),
    function("columns", lambda x: x[:, :2], (6,)),
    function("norm of rows", lambda x: x / ops.norm(x, axis=-1, keepdims=True), (6,)),
    function("sort along columns", lambda x: ops.sort(x, axis=1), (6,)),
    function("top_k", lambda x: ops.top_k(x, 2)[0], (6,)),
    function("argmax one-hot", lambda x: x * ops.one_hot(ops.argmax(x, -1), 6), (6,)),
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
    mixing_function(
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

LOSSES = [
    loss("0 * sum", lambda x: 0.0 * ops.sum(x * x), SUM),
    loss("0 * mean", lambda x: 0.0 * ops.mean(x * x), MEAN),
    loss("sum / rows", lambda x: ops.sum(x * x) / row_count(x), MEAN),
    loss("sum / size", lambda x: ops.sum(x) / ops.cast(ops.size(x), FLOAT), MEAN),
    loss("sum of column means", lambda x: ops.sum(ops.mean(x, 0)), MEAN),
    loss("mean + 1", lambda x: 1 + ops.mean(x), MEAN),
    loss("sum and its half", lambda x: ops.sum(x) - 0.5 * ops.sum(x * x), SUM),
    loss(
        "KL divergence",
        lambda x: -0.5 * ops.mean(ops.sum(1 + x - x * x - ops.exp(x), axis=-1)),
        MEAN,
    ),
    loss("covariance sum", lambda x: ops.sum(ops.matmul(ops.transpose(x), x)), SUM),
    loss("count of positives", lambda x: ops.sum(positive(x)), SUM),
    loss("hinge", lambda x: ops.mean(ops.maximum(0.0, x - 1e6)), MEAN),
    loss("sum of a constant 0", lambda x: ops.sum(x) + 0.0, SUM),
    loss("half a sum in float16", lambda x: ops.cast(ops.sum(x), "float16"), SUM),
    loss(
        "crossentropy",
        lambda x: ops.mean(
            ops.sparse_categorical_crossentropy(ops.argmax(x, -1), x, from_logits=True)
        ),
        MEAN,
    ),
    rows("loss of weights", lambda: own.WeightLoss(), (6,), losses=(SAME,)),
    mixing_loss("0 * max", lambda x: 0.0 * ops.max(x)),
    mixing_loss("sqrt of a sum", lambda x: ops.sqrt(ops.sum(x * x))),
    mixing_loss("sqrt of a mean", lambda x: ops.sqrt(ops.mean(x * x))),
    mixing_loss(
        "masked mean", lambda x: ops.sum(positive(x) * x) / ops.sum(positive(x))
    ),
    mixing_loss("sum + 1", lambda x: 1 + ops.sum(x)),
    mixing_loss("sum + mean", lambda x: ops.sum(x) + ops.mean(x)),
    mixing_loss("sum + 0 * mean", lambda x: ops.sum(x) + 0.0 * ops.mean(x)),
    mixing_loss(
        "load balance",
        lambda x: (
            6
            * ops.sum(
                ops.mean(ops.softmax(x), 0)
                * ops.mean(ops.one_hot(ops.argmax(x, -1), 6), 0)
            )
        ),
    ),
    mixing_loss(
        "rounded sum", lambda x: ops.cast(ops.cast(ops.sum(x), "int32"), FLOAT)
    ),
    mixing_loss("clipped mean", lambda x: ops.clip(ops.mean(x), -1e6, 1e6)),
    mixing_loss("absolute sum", lambda x: ops.abs(ops.sum(x))),
    mixing_loss("sum beyond a limit", lambda x: ops.maximum(0.0, ops.sum(x) - 1e6)),
    mixing_loss("square of a mean", lambda x: ops.square(ops.mean(x))),
    mixing_loss("product of sums", lambda x: ops.prod(ops.sum(x, axis=0))),
    mixing_loss("variance", lambda x: ops.mean(ops.var(x, axis=0))),
    mixing_loss("sum * rows", lambda x: ops.sum(x) * row_count(x)),
    mixing_loss("mean of a slice", lambda x: ops.mean(x[:2])),
    mixing_loss("rows", lambda x: ops.sqrt(row_count(x)) + 0.0 * ops.sum(x)),
    mixing_loss(
        "covariance norm",
        lambda x: ops.sum(ops.square(ops.matmul(ops.transpose(x), x))),
    ),
    mixing_loss(
        "padded sum",
        lambda x: ops.sum(ops.pad(ops.sum(x, 0), ((0, 1),), constant_values=2.0)),
    ),
    mixing_loss("sum or a constant", lambda x: ops.where(True, ops.sum(x), 1.0) + 1.0),
    rows(
        "sum padded by 0",
        lambda: AddLoss(lambda x: ops.sum(ops.pad(ops.sum(x, 0), ((0, 1),)))),
        (6,),
        losses=(SUM,),
    ),
]

UPDATES = [
    rows("counter", lambda: Tracked(lambda v, x: v + 1), (6,), updates=(SAME,)),
    rows(
        "moving average of a mean",
        lambda: Tracked(lambda v, x: 0.9 * v + 0.1 * ops.mean(x)),
        (6,),
        updates=(MEAN,),
    ),
    rows(
        "mean kept",
        lambda: Tracked(lambda v, x: ops.mean(x, axis=0), (6,)),
        (6,),
        updates=(MEAN,),
    ),
    mixing(
        "running max", lambda: Tracked(lambda v, x: ops.maximum(v, ops.max(x))), (6,)
    ),
    mixing("sum kept", lambda: Tracked(lambda v, x: v + ops.sum(x)), (6,)),
    mixing("rows counted", lambda: Tracked(lambda v, x: v + row_count(x)), (6,)),
    mixing(
        "events counted",
        lambda: Tracked(lambda v, x: v + ops.sum(ops.cast(x > 1e6, FLOAT))),
        (6,),
    ),
    mixing("last row kept", lambda: Tracked(lambda v, x: x[-1], (6,)), (6,)),
    mixing("norm kept", lambda: Tracked(lambda v, x: ops.norm(x)), (6,)),
    mixing(
        "variance kept",
        lambda: Tracked(lambda v, x: 0.9 * v + 0.1 * ops.var(x, axis=0), (6,)),
        (6,),
    ),
    mixing("rows kept", lambda: Tracked(lambda v, x: x, (BATCH, 6)), (6,)),
]

GRADIENTS = [
    function(
        "gradient clipped by row",
        own.with_gradient(lambda g: g / (1.0 + ops.norm(g, axis=-1, keepdims=True))),
        (6,),
    ),
    function("reversed gradient", own.with_gradient(lambda g: -0.5 * g), (6,)),
    mixing_function(
        "gradient clipped by its norm",
        own.with_gradient(lambda g: g / ops.maximum(ops.norm(g), 1e6)),
        (6,),
    ),
    mixing_function(
        "gradient of the mean", own.with_gradient(lambda g: g - ops.mean(g, 0)), (6,)
    ),
    mixing_function(
        "gradient divided by rows", own.with_gradient(lambda g: g / row_count(g)), (6,)
    ),
    mixing_loss(
        "gradient of a loss clipped",
        lambda x: ops.sum(
            own.with_gradient(lambda g: ops.clip(g, -1, 1) + ops.mean(g))(x)
        ),
    ),
    rows(
        "weight times its rows",
        lambda: own.Scaled(lambda w, x: x * w + ops.sum(w)),
        (6,),
    ),
    mixing(
        "clipped gradient of a weight",
        lambda: own.Scaled(
            lambda w, x: x * own.with_gradient(lambda g: g / (1e6 + ops.norm(g)))(w)
        ),
        (6,),
    ),
    rows(
        "scaled gradient of a weight",
        lambda: own.Scaled(lambda w, x: x * own.with_gradient(lambda g: 3.0 * g)(w)),
        (6,),
    ),
    mixing(
        "constant gradient of a weight",
        lambda: own.Scaled(
            lambda w, x: x * own.with_gradient(lambda g: ops.ones_like(g))(w)
        ),
        (6,),
    ),
]

CONTROL_FLOW = [
    function(
        "loop over time",
        lambda x: ops.fori_loop(
            0, 5, lambda i, h: h * 0.5 + ops.take(x, i, axis=1), x[:, 0]
        ),
        (5, 3),
    ),
    function(
        "fixed iterations",
        lambda x: ops.fori_loop(0, 3, lambda i, h: ops.tanh(h) + x, x),
        (6,),
    ),
    function("vectorized map", lambda x: ops.vectorized_map(lambda r: r * 2, x), (6,)),
    function(
        "scan over time",
        lambda x: ops.transpose(
            ops.scan(
                lambda c, z: (c + z, c + z), ops.zeros_like(x[:, 0]), ops.transpose(x)
            )[1]
        ),
        (6,),
    ),
    mixing_function(
        "branch on a statistic",
        lambda x: ops.cond(ops.mean(x) > -1e6, lambda: x, lambda: 2 * x),
        (6,),
    ),
    mixing_function(
        "loop until the norm is small",
        lambda x: ops.while_loop(
            lambda h: ops.norm(h) > 1e6, lambda h: (h * 0.5,), (x,)
        )[0],
        (6,),
    ),
    mixing_function(
        "loop over rows",
        lambda x: ops.fori_loop(
            0, ops.shape(x)[0], lambda i, h: h + ops.cast(i, FLOAT), x
        ),
        (6,),
    ),
    mixing_function(
        "value read by Python", lambda x: x * float(ops.convert_to_numpy(x)[0, 0]), (6,)
    ),
    mixing_function(
        "branch of Python on a value", lambda x: x if ops.sum(x) > -1e6 else -x, (6,)
    ),
]


def all_cases() -> Iterator[RowCase]:
    yield from KERAS_LAYERS
    yield from ROW_OPERATIONS
    yield from MIXING_OPERATIONS
    yield from LOSSES
    yield from UPDATES
    yield from GRADIENTS
    yield from CONTROL_FLOW


CASES = list(all_cases())
