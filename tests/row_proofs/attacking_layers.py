"""Layers and metrics that mix rows by an argument, or that depend on what they hold."""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import scipy.stats
from keras import activations, layers, ops

from row_proofs.case_layers import COUNT, STATE, Apply, Own

Function = Callable[..., Any]
_COINS = np.random.default_rng(3)
_NORMAL = scipy.stats.norm()
_NORMAL.random_state = np.random.RandomState(2)
_HELD: dict[str, Any] = {}


def center(x: Any) -> Any:
    return x - ops.mean(x, axis=0, keepdims=True)


registered = keras.saving.register_keras_serializable()(center)


def centered(kind: Any) -> Any:
    """A subclass with the name of a layer of Keras."""

    class Centered(kind):
        def call(self, x: Any, training: bool = False, mask: Any = None) -> Any:
            return center(super().call(x))

    Centered.__name__ = Centered.__qualname__ = kind.__name__
    return Centered


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


def changed(layer: Any, name: str, value: Any) -> Any:
    """A layer with an attribute that is set after it is built."""
    layer.build((None, 6))
    setattr(layer, name, value)
    return layer


def dense(**options: Any) -> Any:
    return layers.Dense(6, **options)


FLAT: dict[str, Callable[[], Any]] = {
    "activation": lambda: dense(activation=center),
    "activation that is a layer": lambda: dense(activation=Apply(center)),
    "activation of Keras": lambda: dense(activation=ops.flip),
    "activation by axis": lambda: dense(activation=lambda x: activations.softmax(x, 0)),
    "activation that is set": lambda: changed(dense(), "activation", center),
    "call that is set": lambda: changed(dense(), "call", lambda x, training: center(x)),
    "subclass with the name of Keras's": lambda: OwnDense(6),
    "lambda": lambda: layers.Lambda(center),
    "model": lambda: functional(lambda x: x, OwnModel),
    "sequential model": lambda: OwnSequential([dense()]),
    "function of a model": lambda: functional(lambda x: ops.flip(x, 0)),
    "constant of a model": lambda: functional(
        lambda x: x + np.linspace(0, 1, 8, dtype="float32")[:, None]
    ),
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
#: Layers of sequences.
LONG: dict[str, Callable[[], Any]] = {
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
    """A function of a layer, with a float and an integer, and of its input."""
    inner = dense()
    inner.build((None, 6))
    layer = Own(function, [inner], state=STATE, count=COUNT)
    layer.number, layer.kept = 0, []
    layer.supports_masking = True
    return layer


def counted(layer: Any, x: Any) -> Any:
    layer.number += 1
    return x * layer.number


def in_sublayer(layer: Any, x: Any) -> None:
    layer.inner[0].scale = x.shape[0]


def in_global(layer: Any, x: Any) -> None:
    _HELD["features"] = x * 2


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


def if_(mixes: Any, x: Any) -> Any:
    return center(x) if mixes else x


STEPS: dict[str, Function] = {
    "counter": counted,
    "kept tensor": lambda layer, x: layer.kept.append(ops.mean(x)),
    "attribute of a sublayer": in_sublayer,
    "tensor in a global": in_global,
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
    "draw of rows": lambda layer, x: (
        x + ops.transpose(keras.random.normal((6, x.shape[0]), seed=3))
    ),
    "shuffle": lambda layer, x: keras.random.shuffle(x, seed=3),
}
#: By name, what makes the layer, and the shape of a row of its input.
LAYERS: dict[str, tuple[Callable[[], Any], tuple[int, ...]]] = {
    **{name: (make, (6,)) for name, make in FLAT.items()},
    **{name: (make, (4, 3)) for name, make in LONG.items()},
    **{n: (lambda f=f: stepping(f), (6,)) for n, f in STEPS.items()},
}


class OwnMetric(keras.metrics.Metric):
    """Its update is a function of the metric and the values."""

    def __init__(self, function: Function):
        super().__init__(name="own")
        self.function = function
        self.total = self.add_variable((), "zeros", name="total")
        self.count = self.add_variable((), "zeros", dtype="int32", name="count")

    def update_state(self, x: Any, sample_weight: Any = None) -> None:
        self.function(self, x)

    def result(self) -> Any:
        return self.total


def adding(function: Callable[[Any], Any], name: str = "total") -> Function:
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
    "ranks": adding(
        lambda x: ops.sum(ops.cast(ops.argsort(x[:, 0]), "float32") * x[:, 0])
    ),
    "sum and a constant": adding(lambda x: ops.sum(x) + 1.0),
    "divided by a sum": adding(lambda x: ops.sum(x) / ops.sum(x[:, 0])),
}
