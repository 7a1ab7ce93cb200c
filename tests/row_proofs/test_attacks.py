"""Calls that mix rows, or hide it, are refused, or parts give the batch's numbers."""

from __future__ import annotations

import functools
import importlib
import math
import random
import sys
from typing import Any

import keras
import numpy as np
import pytest
import scipy.stats
from keras import activations, layers, ops

from keras_strategies.rows.layer_calls import LayerCall
from row_proofs import proofs as own
from row_proofs.proofs import Apply, Function, Make, Own, add_loss

pytestmark = pytest.mark.one_backend("torch", "tensorflow")

WITH_ROWS = np.linspace(-1, 1, 8, dtype="float32")[:, None]
SEED = np.eye(6, dtype="float32")


floats = functools.partial(ops.cast, dtype="float32")
#: Rows as the height of an image.
image = functools.partial(ops.reshape, newshape=(-1, 6, 1))


def length(x: Any) -> Any:
    return ops.shape(x)[0]


def signal(x: Any) -> Any:
    return ops.transpose(x)[:, :, None]


def if_(mixes: Any, x: Any) -> Any:
    return center(x) if mixes else x


def center(x: Any) -> Any:
    return x - ops.mean(x, axis=0, keepdims=True)


def caught(x: Any, read: Function) -> Any:
    """Mixes rows where a value can be read."""
    try:
        read(x)
    except Exception:
        return x
    return x - ops.mean(x)


def entropy(chances: Any) -> Any:
    return -ops.sum(chances * ops.log(chances))


def in_place(x: Any, hidden: Any) -> Any:
    seen = ops.reshape(hidden, (-1,))
    seen += ops.mean(x)
    return hidden * 2.0


def grown(carry: Any, row: Any) -> Any:
    return carry * 1.1, None


def own_gradient(gradient: Function) -> Function:
    """Made before replicas follow what is called."""
    return ops.custom_gradient(own.doubled(gradient))


def each(names: str, form: Function) -> dict[str, Function]:
    return {n: lambda x, n=n: form(getattr(ops, n), x) for n in names.split()}


#: Sums over rows that are used further, which replicas can exchange.
SUMS: dict[str, Function] = {
    **each("mean", lambda f, x: x - f(x, axis=0)),
    **each("square abs round", lambda f, x: f(ops.sum(x, axis=0))),
    **each("array convert_to_tensor cast view", lambda f, x: f(ops.sum(x, 0), "int32")),
    "mean of all": lambda x: x - ops.mean(x),
    "mean by a negative axis": lambda x: x - ops.mean(x, axis=-2, keepdims=True),
    "mean by a tuple": lambda x: x - ops.mean(x, axis=(0,)),
    "mean by a product": lambda x: x - ops.matmul(ops.ones((1, length(x))), x) / 8,
    "mean of a transpose": lambda x: x - ops.mean(ops.transpose(x), axis=1),
    "mean of a flat tensor": lambda x: x - ops.mean(ops.reshape(x, (-1,))),
    "mean of two axes": lambda x: x - ops.mean(x[:, :, None], axis=(0, 1)),
    "count": lambda x: x * floats(ops.count_nonzero(x > 0)),
    "sum by einsum": lambda x: x - ops.einsum("bi->i", x),
    "sum by tensordot": lambda x: x * ops.tensordot(x, x, axes=2),
    "standard deviation": lambda x: x / (1 + ops.std(x, axis=0)),
    "batch normalization": lambda x: ops.batch_normalization(
        x, ops.mean(x, 0), ops.var(x, 0), axis=1
    ),
    "branch": lambda x: ops.cond(ops.sum(x) > 0, lambda: x, lambda: -x),
    "select": lambda x: ops.select([ops.mean(x, 0) > 0], [x], -x),
    "mean of ones": lambda x: x + ops.sum(ops.ones_like(x[:, 0])),
    "saturated sum": lambda x: ops.saturate_cast(ops.sum(x, axis=0), "uint8"),
}
_ALONG_ROWS = """prod normalize flip sort cumsum cumprod diff softmax sparsemax
    layer_normalization"""
FUNCTIONS: dict[str, Function] = {
    **SUMS,
    **each(_ALONG_ROWS, lambda f, x: f(x, axis=0)),
    **each("average amax logsumexp", lambda f, x: x - f(x, axis=0)),
    "mean by NumPy's number": lambda x: x - ops.mean(x, axis=np.int64(0)),
    "moments": lambda x: x - ops.moments(x, axes=[0])[0],
    "variance": lambda x: x * ops.moments(x, axes=[0])[1],
    "norm": lambda x: x / ops.norm(x),
    "normalize all": lambda x: ops.normalize(x, axis=None),
    "sum by a loop": lambda x: x - sum(x, ops.zeros((6,))),
    "sum by unstack": lambda x: x - sum(ops.unstack(x)),
    "segment sum": lambda x: ops.segment_sum(x, ops.zeros((length(x),), "int32"), 1),
    "segment max": lambda x: ops.segment_max(x, ops.cast(x[:, 0] > 0, "int32"), 2),
    "Gram by einsum": lambda x: ops.einsum("bi,ci,cj->bj", x, x, x),
    "sum by trace": lambda x: x * ops.trace(ops.matmul(x, ops.transpose(x))),
    "convolution": lambda x: ops.conv(signal(x), ops.ones((3, 1, 1)), 1, "same"),
    "largest by pooling": lambda x: ops.max_pool(signal(x), 3, 1, "same"),
    "quantile": lambda x: x - ops.quantile(x, 0.4, axis=0),
    "median": lambda x: x - ops.median(x),
    "any": lambda x: if_(False, x) * floats(ops.any(x > 1, axis=0)),
    "histogram": lambda x: ops.bincount(ops.argmax(x, 1), minlength=6),
    "correlation": lambda x: ops.corrcoef(ops.transpose(x)),
    "first row": lambda x: x + x[0],
    "last row": lambda x: x + x[-1:],
    "turned": lambda x: x[::-1],
    "every other row": lambda x: ops.repeat(x[::2], 2, axis=0)[: length(x)],
    "flip of all": lambda x: ops.flip(x),
    "roll": lambda x: ops.roll(x, 1, axis=0),
    "roll of all": lambda x: ops.roll(x, 1),
    "roll by a negative axis": lambda x: ops.roll(x, 1, axis=-2),
    "rot90": lambda x: ops.rot90(ops.rot90(x)),
    "sort of all": lambda x: ops.reshape(ops.sort(x, axis=None), ops.shape(x)),
    "argsort": lambda x: ops.take_along_axis(x, ops.argsort(x, axis=0), axis=0),
    "ranks": lambda x: floats(ops.argsort(x[:, 0])),
    "largest rows": lambda x: ops.top_k(ops.transpose(x), 1)[0],
    "largest of a flat tensor": lambda x: ops.top_k(ops.reshape(x, (-1,)), 3)[0],
    "cumsum of all": lambda x: ops.reshape(ops.cumsum(x), ops.shape(x)),
    "rows by number": lambda x: ops.take(x, [2, 0, 1], axis=0),
    "rows by a row's number": lambda x: ops.take(x, ops.argmax(x[:, :3], 1), axis=0),
    "rows by a tensor": lambda x: x[ops.argmax(x[:, :3], 1)],
    "row of a flat tensor": lambda x: ops.take(x, [7]) + x,
    "entries along rows": lambda x: ops.take_along_axis(x, ops.argmin(x, 0)[None], 0),
    "reshape": lambda x: ops.reshape(ops.transpose(x), ops.shape(x)),
    "reshape to pairs": lambda x: ops.reshape(x, (-1, 12)),
    "reshape to blocks": lambda x: ops.mean(ops.reshape(x, (-1, 3, 2)), axis=0),
    "reshape in another order": lambda x: ops.reshape(ops.reshape(x, (6, -1)), (-1, 6)),
    "unraveled": lambda x: ops.reshape(ops.ravel(ops.transpose(x)), (-1, 6)),
    "rearranged": lambda x: ops.rearrange(x, "(a b) c -> b (a c)", a=1) - x[:1],
    "tile": lambda x: ops.tile(x, (2, 1))[length(x) - 1 : -1],
    "repeat": lambda x: ops.repeat(x, 2, axis=0)[: length(x)],
    "repeats for each row": lambda x: ops.repeat(
        x, np.array([2, 0, *[1] * (x.shape[0] - 2)]), axis=0
    ),
    "repeats by the number of rows": lambda x: ops.repeat(
        x, np.array([*([2, 0] if x.shape[0] > 5 else [0, 2]), 1, 1, 1, 1]), axis=1
    ),
    "padded": lambda x: ops.pad(x, ((1, 0), (0, 0)))[:-1],
    "concatenated": lambda x: ops.concatenate([x[1:], x[:1]]),
    "split": lambda x: ops.concatenate(ops.split(x, [1])[::-1]),
    "outer": lambda x: ops.outer(x[:, 0], x[:, 1]),
    "kron": lambda x: ops.kron(x[:1], x),
    "diagonal": lambda x: ops.diagonal(ops.matmul(x, ops.transpose(x))),
    "triangle": lambda x: ops.tril(x),
    "slice": lambda x: ops.slice(x, (1, 0), (2, 6)),
    "slice update": lambda x: ops.slice_update(x, (0, 0), x[:1] * 2),
    "scatter": lambda x: ops.scatter([[1], [0]], x[:2], (2, 6)),
    "scatter update": lambda x: ops.scatter_update(x, [[0]], x[1:2]),
    "in place": lambda x: in_place(x, x * 1.0),
    "in place of an argument": lambda x: in_place(x, x),
    "meshgrid": lambda x: ops.meshgrid(x[:, 0], x[:, 1])[0],
    "interpolated": lambda x: ops.image.resize(image(x), (3, 6)),
    "affine": lambda x: ops.image.affine_transform(image(x), ops.ones((8,)), "nearest"),
    "coordinates": lambda x: ops.image.map_coordinates(x, x[:2] * 2, order=1),
    "inverse STFT": lambda x: ops.istft((x[:, :3], x[:, 3:]), 5, 1, 5, window=None),
    "unfold": lambda x: ops.extract_sequences(ops.transpose(x), 2, 1),
    "FFT": lambda x: ops.fft((ops.transpose(x), ops.transpose(x)))[0],
    "inverse": lambda x: ops.inv(ops.matmul(ops.transpose(x), x) + SEED),
    "QR": lambda x: ops.qr(x)[0],
    "fitted": lambda x: ops.lstsq(x, x[:, :1]),
    "whitened": lambda x: ops.matmul(x, ops.cholesky(ops.outer(x[0], x[0]) + SEED)),
    "distances": lambda x: ops.norm(x[:, None] - x[None], axis=-1),
    "attention": lambda x: ops.softmax(x @ ops.transpose(x)) @ x,
    "attention of Keras": lambda x: ops.dot_product_attention(
        *[ops.reshape(x, (1, -1, 2, 3))] * 3
    ),
    "softmax of two axes": lambda x: ops.softmax(x, axis=(0, 1)),
    "softmax by a negative axis": lambda x: ops.log_softmax(x, axis=-2),
    "softmax of rank 1": lambda x: x * ops.softmax(x[:, 0])[:, None],
    "RMS normalization": lambda x: ops.rms_normalization(x, axis=(0, 1)),
    "crossentropy": lambda x: ops.categorical_crossentropy(
        *[ops.softmax(x)] * 2, axis=0
    ),
    "in top k": lambda x: floats(ops.in_top_k(ops.argmax(x, 0), ops.transpose(x), 1)),
    "scan": lambda x: ops.scan(lambda c, r: (c + r, c), ops.zeros((6,)), x)[1],
    "scan that counts": lambda x: x * ops.scan(grown, ops.ones(()), x)[0],
    "associative scan": lambda x: ops.associative_scan(ops.add, x, axis=0),
    "scan by a negative axis": lambda x: ops.associative_scan(ops.maximum, x, axis=-2),
    "map with all rows": lambda x: ops.vectorized_map(lambda r: r - ops.max(x), x),
    "map with row numbers": lambda x: ops.map(
        lambda p: p[0] * floats(p[1]), (x, ops.arange(length(x)))
    ),
    "loop": lambda x: ops.fori_loop(0, 3, lambda i, c: c - ops.mean(c), x),
    "loop over rows": lambda x: ops.fori_loop(0, length(x), lambda i, c: c * 1.1, x),
    "loop over numbers": lambda x: ops.scan(grown, x, ops.arange(length(x)))[0],
    "loop while": lambda x: ops.while_loop(
        lambda h: ops.max(h) > 0.5, lambda h: (h * 0.5,), (x,)
    )[0],
    "branch of Python": lambda x: x if ops.sum(x) > 0 else -x,
    "switch": lambda x: ops.switch(
        ops.cast(ops.max(x) > 2, "int32"), [lambda h: h, lambda h: -h], x
    ),
    "where": lambda x: ops.where(ops.max(x) > 2, x, -x),
    "remat": lambda x: keras.remat(lambda h: h - ops.mean(h))(x),
    "vectorize": lambda x: ops.vectorize(lambda v: v - ops.max(x))(x),
    "gradient of a mean": own_gradient(lambda x, g: g - ops.mean(g)),
    "gradient by other rows": own_gradient(lambda x, g: ops.flip(g, 0) * 2.0),
    "gradient by the rows": own_gradient(lambda x, g: g * ops.max(x)),
    "gradient by their number": own_gradient(lambda x, g: g * float(len(x))),
    "gradient that is clipped": own_gradient(
        lambda x, g: g * ops.minimum(1.0, 0.1 / ops.norm(g))
    ),
    "divided by the rows": lambda x: x / floats(length(x)),
    "divided by the size": lambda x: x / floats(ops.size(x)),
    "length": lambda x: x * len(x),
    "logarithm of the rows": lambda x: x * math.log(x.shape[0]),
    "chunks": lambda x: x * (length(x) // 6 + 1),
    "compared": lambda x: x * floats(ops.arange(6) < length(x)),
    "branch on the rows": lambda x: if_(x.shape[0] > 5, x),
    "row numbers": lambda x: x + floats(ops.arange(length(x)))[:, None],
    "linspace": lambda x: x + ops.linspace(0.0, 1.0, x.shape[0])[:, None],
    "identity": lambda x: ops.eye(x.shape[0]) @ x + ops.tri(x.shape[0]) @ x,
    "identity of the rows": lambda x: ops.eye(x.shape[0])[:, :1] + x,
    "table up to the rows": lambda x: x + ops.convert_to_tensor(WITH_ROWS)[: length(x)],
    "columns up to the rows": lambda x: ops.sum(x[:, : length(x)], axis=1),
    "shifted by the rows": lambda x: ops.roll(x, length(x), axis=1),
    "one hot of the rows": lambda x: x * ops.one_hot(x.shape[0] % 6, 6),
    "mean by hand": lambda x: x - ops.sum(x, 0) / len(x),
    "square root of the rows": lambda x: x / ops.sqrt(floats(length(x))),
    "cumsum of a sum": lambda x: ops.cumsum(ops.sum(x, axis=0), dtype="int32"),
    # Values that are read, and traces that are recognized.
    "read": lambda x: x * float(ops.convert_to_numpy(ops.mean(x))),
    "read by NumPy": lambda x: x - np.mean(x),
    "read by float": lambda x: x * float(ops.mean(x)),
    "read by int": lambda x: x[:, : int(ops.max(x) > 2) + 1],
    "read by a list": lambda x: x * max(x.tolist()[0]),
    "caught float": lambda x: caught(x, lambda h: float(h[0, 0])),
    "caught array": lambda x: caught(x, np.asarray),
    "caught truth": lambda x: caught(x, lambda h: bool(h[0, 0] < 9)),
    "caught NumPy": lambda x: caught(x, ops.convert_to_numpy),
    "attribute": lambda x: if_(hasattr(x, "device"), x),
    "attribute of values": lambda x: if_(not hasattr(x, "sparse"), x),
    "attribute of Keras": lambda x: if_(not hasattr(x, "record_history"), x),
    "symbolic": lambda x: if_(not isinstance(x, keras.KerasTensor), x),
    "symbolic for Keras": lambda x: if_(not keras.utils.is_keras_tensor(x), x),
    "name of the class": lambda x: if_(type(x).__name__ != "RowTensor", x),
    "class of tensors": lambda x: if_("Tensor" in type(x).__name__[-6:], x),
    "module of the class": lambda x: if_("keras" not in type(x).__module__, x),
    "dtype": lambda x: if_(x.dtype != "float32", x),
    "text": lambda x: if_("row" not in repr(x), x),
    "debugger": lambda x: if_(sys.gettrace() is None, x),
}
#: Those that are the same in traces for any number of rows.
OF_ANY_ROWS: dict[str, Function] = {
    "at most a number of rows": lambda x: x[:5000],
    "the last rows": lambda x: x[-5000:],
    "number of rows as an integer": lambda x: if_(not isinstance(length(x), int), x),
    "number of rows that is read": lambda x: x * (int(length(x)) > 0),
    "number of rows that is rounded": lambda x: x * (math.floor(length(x)) > 0),
    "at least one row": lambda x: x / max(length(x), 1),
}
SUM_LOSSES: dict[str, Function] = {
    "square of a sum": lambda x: ops.square(ops.sum(x)),
    "square of a mean": lambda x: ops.square(ops.mean(x)),
    "root of a mean": lambda x: ops.sqrt(ops.mean(ops.square(x))),
    "masked mean": lambda x: ops.sum(x * floats(x > 0)) / (1 + ops.sum(floats(x > 0))),
    "sum and a constant": lambda x: ops.sum(x) + 1.0,
    "mean and a sum": lambda x: ops.mean(x) + ops.sum(x),
    "product of means": lambda x: ops.mean(x[:, 0]) * ops.mean(x[:, 1]),
    "covariance": lambda x: ops.mean(x[:, 0] * x[:, 1]) - ops.mean(x[:, 0]) ** 2,
    "logarithm of a mean": lambda x: ops.log(ops.mean(ops.square(x))),
    "largest of means": lambda x: ops.maximum(ops.mean(x), 0.0),
    "mean as an integer": lambda x: floats(ops.cast(ops.mean(x), "int32")),
    "entropy of a mean": lambda x: entropy(ops.mean(ops.softmax(x), 0)),
    "where": lambda x: ops.where(ops.mean(x) > 0, ops.mean(x), 0.0),
    "variance": ops.var,
}
LOSSES: dict[str, Function] = {
    **SUM_LOSSES,
    "largest": ops.max,
    "norm": ops.norm,
    "first row": lambda x: ops.mean(x[0]),
    "contrast": lambda x: ops.mean(ops.logsumexp(x @ ops.transpose(x), 1)),
    "by the rows": lambda x: ops.sum(x) / ops.sqrt(floats(ops.size(x))),
    "median": ops.median,
}
dense = functools.partial(layers.Dense, 6)
_COINS = np.random.default_rng(3)
_NORMAL = scipy.stats.norm()
_NORMAL.random_state = np.random.RandomState(2)
_HELD: dict[str, Any] = {}
normal = keras.random.normal


def centered(kind: Any) -> Any:
    class Centered(kind):
        def call(self, x: Any, training: bool = False, mask: Any = None) -> Any:
            return center(super().call(x))

    Centered.__name__ = Centered.__qualname__ = kind.__name__
    return Centered


registered = keras.saving.register_keras_serializable()(center)
OwnDense, OwnModel = centered(layers.Dense), centered(keras.Model)
OwnSequential = centered(keras.Sequential)


class Cell(layers.Layer):
    state_size = output_size = 3

    def call(self, x: Any, states: Any) -> Any:
        return center(x), [center(x)]


class Squares(keras.regularizers.Regularizer):
    def __call__(self, x: Any) -> Any:
        return ops.square(ops.sum(x))


class OwnMask(layers.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.supports_masking = True

    def call(self, x: Any) -> Any:
        return x * 1.0

    def compute_mask(self, x: Any, mask: Any = None) -> Any:
        return ops.roll(x[:, :, 0] > 0, 1, axis=0)


def functional(function: Function, kind: Any = keras.Model) -> Any:
    inputs = keras.Input((6,))
    return kind(inputs, function(layers.Dense(6)(inputs)))


def changed(name: str, value: Any) -> Any:
    layer = dense()
    layer.build((None, 6))
    setattr(layer, name, value)
    return layer


FLAT: dict[str, Make] = {
    "activation": lambda: dense(activation=center),
    "activation that is a layer": lambda: dense(activation=Apply(center)),
    "activation of Keras": lambda: dense(activation=ops.flip),
    "activation by axis": lambda: dense(activation=lambda x: activations.softmax(x, 0)),
    "activation that is set": lambda: changed("activation", center),
    "call that is set": lambda: changed("call", lambda x, training: center(x)),
    "subclass with the name of Keras's": lambda: OwnDense(6),
    "lambda": lambda: layers.Lambda(center),
    "model": lambda: functional(lambda x: x, OwnModel),
    "sequential model": lambda: OwnSequential([dense()]),
    "function of a model": lambda: functional(lambda x: ops.flip(x, 0)),
    "constant of a model": lambda: functional(lambda x: x + WITH_ROWS),
    "layer of a model": lambda: functional(Apply(center)),
    "model in a model": lambda: functional(functional(Apply(center))),
    "regularizer": lambda: dense(activity_regularizer=Squares()),
    "regularizer of Keras": lambda: dense(
        activity_regularizer=keras.regularizers.OrthogonalRegularizer()
    ),
    "softmax": lambda: layers.Softmax(axis=0),
    "softmax by a negative axis": lambda: layers.Softmax(axis=-2),
    "softmax of two axes": lambda: layers.Softmax(axis=(0, 1)),
    "softmax of all axes": lambda: layers.Softmax(axis=None),
    "unit normalization": lambda: layers.UnitNormalization(axis=0),
    "concatenation": lambda: functional(lambda x: layers.Concatenate(axis=0)([x, x])),
    "einsum": lambda: layers.EinsumDense("ab,bc->ac", 3, activation=center),
    "attention": lambda: functional(lambda x: layers.Attention()([x, x])),
    "added attention": lambda: functional(lambda x: layers.AdditiveAttention()([x, x])),
    "spectral norm": lambda: layers.SpectralNormalization(dense(activation=center)),
    "rescaling": lambda: layers.Rescaling(np.arange(8.0)[:, None]),
}
LONG: dict[str, Make] = {  # Layers of sequences.
    "attention over axis 0": lambda: stepping(
        lambda layer, x: layers.Attention()([ops.swapaxes(x, 0, 1)] * 2)
    ),
    "cell": lambda: layers.RNN(Cell()),
    "cells": lambda: layers.RNN([layers.SimpleRNNCell(3), Cell()]),
    "activation of a cell": lambda: layers.LSTM(3, activation=center),
    "recurrent activation": lambda: layers.GRU(3, recurrent_activation=center),
    "bidirectional": lambda: layers.Bidirectional(layers.SimpleRNN(3, registered)),
    "time distributed": lambda: layers.TimeDistributed(Apply(center)),
    "mask": OwnMask,
}


def stepping(function: Function) -> Own:
    inner = dense()
    inner.build((None, 6))
    layer = Own(function, [inner], state=own.STATE, count=own.COUNT)
    layer.number, layer.kept = 0, []
    layer.supports_masking = True
    return layer


def counted(layer: Any, x: Any) -> Any:
    layer.number += 1
    return x * layer.number


def for_large_batches(layer: Any, x: Any) -> None:
    if x.shape[0] > 6:
        layer.state.assign(layer.count.value)


def assigned(function: Function, name: str = "state") -> Function:
    def apply(layer: Any, x: Any) -> None:
        getattr(layer, name).assign(function(x))

    return apply


def in_body(layer: Any, x: Any) -> Any:
    def body(i: Any, carry: Any) -> Any:
        layer.state.assign_add(ops.mean(carry))
        return carry * 1.1

    return ops.fori_loop(0, 2, body, x)


def by_name_of_module(layer: Any, x: Any) -> Any:
    name = keras.backend.backend()
    framework = importlib.import_module(name)
    return x + (framework.mean if name == "torch" else framework.reduce_mean)(x)


STEPS: dict[str, Function] = {
    "counter": counted,
    "kept tensor": lambda layer, x: layer.kept.append(ops.mean(x)),
    "attribute of a sublayer": lambda o, x: setattr(o.inner[0], "n", x.shape[0]),
    "tensor in a global": lambda layer, x: _HELD.update(features=x * 2),
    "coin": lambda layer, x: if_(random.random() < 0.5, x),
    "coin of NumPy": lambda layer, x: if_(np.random.rand() < 0.5, x),
    "coin of a generator": lambda layer, x: if_(_COINS.random() < 0.5, x),
    "coin of a library": lambda layer, x: if_(scipy.stats.norm.rvs() < 0, x),
    "coin of a distribution": lambda layer, x: if_(_NORMAL.rvs() < 0, x),
    "framework by its name": by_name_of_module,
    "state of large batches": for_large_batches,
    "state of the largest": assigned(ops.max),
    "state of a sum": assigned(ops.sum),
    "state of a row": assigned(lambda x: x[0, 0]),
    "state of a square": assigned(lambda x: ops.square(ops.mean(x))),
    "integer state of a mean": assigned(ops.mean, "count"),
    "state in a loop": in_body,
    "draw of rows": lambda layer, x: x + ops.transpose(normal((6, x.shape[0]), seed=3)),
    "shuffle": lambda layer, x: keras.random.shuffle(x, seed=3),
}


class OwnMetric(keras.metrics.Metric):
    def __init__(self, function: Function):
        super().__init__(name="own")
        self.function = function
        self.total = self.add_variable((), "zeros", name="total")
        self.count = self.add_variable((), "zeros", dtype="int32", name="count")

    def update_state(self, x: Any, sample_weight: Any = None) -> None:
        self.function(self, x)


def adding(function: Function, name: str = "total") -> Function:
    return lambda metric, x: getattr(metric, name).assign_add(function(x))


METRICS: dict[str, Function] = {
    "largest": adding(ops.max),
    "square of a sum": adding(lambda x: ops.square(ops.sum(x))),
    "assigned": lambda m, x: m.total.assign(ops.sum(x)),
    "maximum so far": lambda m, x: m.total.assign(ops.maximum(m.total, ops.max(x))),
    "moving": lambda m, x: m.total.assign_add(0.1 * (ops.mean(x) - m.total)),
    "integer of a sum": adding(ops.sum, "count"),
    "integer of a mean": adding(lambda x: ops.cast(ops.mean(x), "int32"), "count"),
    "first row": adding(lambda x: x[0, 0]),
    "median": adding(ops.median),
    "ranks": adding(lambda x: ops.sum(floats(ops.argsort(x[:, 0])) * x[:, 0])),
    "sum and a constant": adding(lambda x: ops.sum(x) + 1.0),
    "divided by a sum": adding(lambda x: ops.sum(x) / ops.sum(x[:, 0])),
}
#: What Keras refuses on a backend.
_BY_TORCH = ("mean by NumPy's number", "turned", "layer_normalization", "read by NumPy")
_BY_TENSORFLOW = ("rows by a tensor", "vectorize", "read by a list")
NOT_IN_KERAS = {"torch": _BY_TORCH, "tensorflow": _BY_TENSORFLOW}


def batch(rows: int = 8, factor: float = 1.0, shape: Any = (6,)) -> Any:
    return own.normal(rows, *shape, seed=5) * factor + np.float32(0.3)


#: By name, what makes a layer, and the shape of a row of its input.
ATTACKS: dict[str, tuple[Make, tuple[int, ...]]] = {
    **{name: (lambda f=f: Apply(f), (6,)) for name, f in FUNCTIONS.items()},
    **{f"loss: {n}": (lambda f=f: add_loss(f), (6,)) for n, f in LOSSES.items()},
    **{f"layer: {name}": (make, (6,)) for name, make in FLAT.items()},
    **{f"layer: {name}": (make, (4, 3)) for name, make in LONG.items()},
    **{f"layer: {n}": (lambda f=f: stepping(f), (6,)) for n, f in STEPS.items()},
}


def is_refused(layer: Any, shape: Any, sizes: Any, any_rows: bool = False) -> bool:
    """Whether a call is refused; if not, its parts give the numbers of the batch."""
    values = batch(sum(sizes), 1.0, shape)
    layer(ops.convert_to_tensor(values), training=True)
    proof = own.proof_of(layer, [values], sizes=() if any_rows else sizes)
    if proof.problem is None:
        # Larger values than those of the proof.
        own.assert_parts_equal(
            layer, [batch(sum(sizes), 7.0, shape)], proof, sizes=sizes
        )
    return proof.problem is not None


@pytest.mark.one_backend("torch", "tensorflow")
@own.needs_split
@pytest.mark.parametrize("name", ATTACKS)
def test_attacks(name: str) -> None:
    make, shape = ATTACKS[name]
    if name in NOT_IN_KERAS.get(own.BACKEND, ()):
        with pytest.raises(Exception):  # noqa: B017  Of many types.
            make()(ops.convert_to_tensor(batch()), training=True)
        return
    for sizes in (5, 3), (7, 1):
        keras.utils.set_random_seed(1)
        refused = is_refused(make(), shape, sizes)
        assert refused or not name.startswith("layer: ")


@pytest.mark.one_backend("tensorflow")
@own.of_tensorflow
@pytest.mark.parametrize("name", [*FUNCTIONS, *OF_ANY_ROWS])
def test_functions_for_any_number_of_rows(name: str) -> None:
    function = OF_ANY_ROWS.get(name) or FUNCTIONS[name]
    if name not in NOT_IN_KERAS["tensorflow"]:
        is_refused(Apply(function), (6,), (5, 3), any_rows=True)


@own.needs_split
@pytest.mark.parametrize("name", METRICS)
def test_metrics(name: str) -> None:
    metric, x = OwnMetric(METRICS[name]), ops.convert_to_tensor(batch())

    def call(x: Any) -> None:
        metric.update_state(x)

    inputs = (x,), {}
    of = LayerCall(layers.Identity(), call, inputs, [x], 8, adds=True, only_adds=True)
    assert own.prover().prove(of, [True], (5, 3)).problem is not None
