"""Layers and metrics that mix rows by an argument, or that depend on what they hold."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import scipy.stats
from keras import layers, ops

Function = Callable[..., Any]
_COINS = np.random.default_rng(3)
_NORMAL = scipy.stats.norm()
_NORMAL.random_state = np.random.RandomState(2)
_HELD: dict[str, Any] = {}


def center(x: Any) -> Any:
    return x - ops.mean(x, axis=0, keepdims=True)


registered = keras.saving.register_keras_serializable()(center)


class Center(layers.Layer):
    def call(self, x: Any) -> Any:
        return center(x)


class OwnDense(layers.Dense):
    def call(self, x: Any, training: bool = False) -> Any:
        return center(super().call(x))


OwnDense.__name__ = OwnDense.__qualname__ = "Dense"


class Cell(layers.Layer):
    state_size = output_size = 3

    def call(self, x: Any, states: Any) -> Any:
        return center(x), [center(x)]


class Step(layers.Layer):
    """A function of the layer and of its input, with a float and an integer."""

    def __init__(self, function: Function, **options: Any):
        super().__init__(**options)
        self.function = function
        self.number, self.inner = 0, [layers.Dense(6)]
        self.kept: list[Any] = []
        self.supports_masking = True

    def build(self, shape: Any) -> None:
        zero = {"initializer": "zeros", "trainable": False}
        self.state = self.add_weight(shape=(), name="state", **zero)
        self.count = self.add_weight(shape=(), dtype="int32", name="count", **zero)
        self.built = True

    def call(self, x: Any) -> Any:
        found = self.function(self, x)
        return x if found is None else found


class Squares(keras.regularizers.Regularizer):
    def __call__(self, x: Any) -> Any:
        return ops.square(ops.sum(x))


class OwnMask(layers.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.supports_masking = True

    def compute_mask(self, x: Any, mask: Any = None) -> Any:
        return ops.roll(x[:, :, 0] > 0, 1, axis=0)

    def call(self, x: Any) -> Any:
        return x * 1.0


class OwnModel(keras.Model):
    def call(self, x: Any, training: bool = False) -> Any:
        return center(super().call(x))


class OwnSequential(keras.Sequential):
    def call(self, x: Any, training: Any = None, mask: Any = None) -> Any:
        return center(super().call(x))


def functional(function: Function, kind: Any = keras.Model) -> Any:
    inputs = keras.Input((6,))
    return kind(inputs, function(layers.Dense(6)(inputs)))


def changed(layer: Any, name: str, value: Any) -> Any:
    """A layer with an attribute that is set after it is built."""
    layer.build((None, 6))
    setattr(layer, name, value)
    return layer


def counted(layer: Any, x: Any) -> Any:
    layer.number += 1
    return x * layer.number


def kept(layer: Any, x: Any) -> Any:
    layer.kept.append(ops.mean(x))


def in_sublayer(layer: Any, x: Any) -> Any:
    layer.inner[0].scale = x.shape[0]


def in_global(layer: Any, x: Any) -> None:
    _HELD["features"] = x * 2


def coin(layer: Any, x: Any) -> Any:
    return center(x) if random.random() < 0.5 else x


def coin_of_numpy(layer: Any, x: Any) -> Any:
    return center(x) if np.random.rand() < 0.5 else x


def coin_of_generator(layer: Any, x: Any) -> Any:
    return center(x) if _COINS.random() < 0.5 else x


def coin_of_library(layer: Any, x: Any) -> Any:
    return center(x) if scipy.stats.norm.rvs() < 0 else x


def coin_of_distribution(layer: Any, x: Any) -> Any:
    return center(x) if _NORMAL.rvs() < 0 else x


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
    import importlib

    framework = importlib.import_module(keras.backend.backend())
    if keras.backend.backend() == "torch":
        return x + framework.mean(x)
    return x + framework.reduce_mean(x)


def step(function: Function) -> Any:
    return (lambda: Step(function)), (6,)


def flat(make: Callable[[], Any]) -> Any:
    return make, (6,)


def long(make: Callable[[], Any]) -> Any:
    return make, (4, 3)


#: By name, what makes the layer, and the shape of a row of its input.
LAYERS: dict[str, tuple[Callable[[], Any], tuple[int, ...]]] = {
    "activation": flat(lambda: layers.Dense(6, activation=center)),
    "activation that is a layer": flat(lambda: layers.Dense(6, activation=Center())),
    "activation of Keras": flat(lambda: layers.Dense(6, activation=ops.flip)),
    "activation with an axis": flat(
        lambda: layers.Dense(6, activation=lambda x: keras.activations.softmax(x, 0))
    ),
    "activation that is set": flat(
        lambda: changed(layers.Dense(6), "activation", center)
    ),
    "call that is set": flat(
        lambda: changed(layers.Dense(6), "call", lambda x, training: center(x))
    ),
    "subclass with the name of Keras's": flat(lambda: OwnDense(6)),
    "lambda": flat(lambda: layers.Lambda(center)),
    "model": flat(lambda: functional(lambda x: x, OwnModel)),
    "sequential model": flat(lambda: OwnSequential([layers.Dense(6)])),
    "function of a model": flat(lambda: functional(lambda x: ops.flip(x, 0))),
    "constant of a model": flat(
        lambda: functional(lambda x: x + np.linspace(0, 1, 8, dtype="float32")[:, None])
    ),
    "layer of a model": flat(lambda: functional(Center())),
    "model in a model": flat(lambda: functional(functional(Center()))),
    "regularizer": flat(lambda: layers.Dense(6, activity_regularizer=Squares())),
    "regularizer of Keras": flat(
        lambda: layers.Dense(
            6, activity_regularizer=keras.regularizers.OrthogonalRegularizer()
        )
    ),
    "softmax": flat(lambda: layers.Softmax(axis=0)),
    "softmax by a negative axis": flat(lambda: layers.Softmax(axis=-2)),
    "softmax of two axes": flat(lambda: layers.Softmax(axis=(0, 1))),
    "softmax of all axes": flat(lambda: layers.Softmax(axis=None)),
    "unit normalization": flat(lambda: layers.UnitNormalization(axis=0)),
    "concatenation": flat(
        lambda: functional(lambda x: layers.Concatenate(axis=0)([x, x]))
    ),
    "einsum": flat(lambda: layers.EinsumDense("ab,bc->ac", 3, activation=center)),
    "attention": flat(
        lambda: functional(lambda x: layers.Attention()([x, x])),
    ),
    "additive attention": flat(
        lambda: functional(lambda x: layers.AdditiveAttention()([x, x])),
    ),
    "attention over axis 0": long(
        lambda: Step(lambda layer, x: layers.Attention()([ops.swapaxes(x, 0, 1)] * 2))
    ),
    "cell": long(lambda: layers.RNN(Cell())),
    "cells": long(lambda: layers.RNN([layers.SimpleRNNCell(3), Cell()])),
    "activation of a cell": long(lambda: layers.LSTM(3, activation=center)),
    "recurrent activation": long(lambda: layers.GRU(3, recurrent_activation=center)),
    "bidirectional": long(
        lambda: layers.Bidirectional(layers.SimpleRNN(3, activation=registered))
    ),
    "time distributed": long(lambda: layers.TimeDistributed(Center())),
    "spectral normalization": flat(
        lambda: layers.SpectralNormalization(layers.Dense(6, activation=center))
    ),
    "rescaling": flat(lambda: layers.Rescaling(np.arange(8.0)[:, None])),
    "mask": long(OwnMask),
    "counter": step(counted),
    "kept tensor": step(kept),
    "attribute of a sublayer": step(in_sublayer),
    "tensor in a global": step(in_global),
    "coin": step(coin),
    "coin of NumPy": step(coin_of_numpy),
    "coin of a generator": step(coin_of_generator),
    "coin of a library": step(coin_of_library),
    "coin of a distribution": step(coin_of_distribution),
    "framework by its name": step(by_name_of_module),
    "state of large batches": step(for_large_batches),
    "state of the largest": step(assigned(ops.max)),
    "state of a sum": step(assigned(ops.sum)),
    "state of a row": step(assigned(lambda x: x[0, 0])),
    "state of a square": step(assigned(lambda x: ops.square(ops.mean(x)))),
    "integer state of a mean": step(assigned(ops.mean, "count")),
    "state in a loop": step(in_body),
    "draw of rows": step(
        lambda layer, x: x + ops.transpose(keras.random.normal((6, x.shape[0]), seed=3))
    ),
    "shuffle": step(lambda layer, x: keras.random.shuffle(x, seed=3)),
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


METRICS: dict[str, Function] = {
    "largest": lambda m, x: m.total.assign_add(ops.max(x)),
    "square of a sum": lambda m, x: m.total.assign_add(ops.square(ops.sum(x))),
    "assigned": lambda m, x: m.total.assign(ops.sum(x)),
    "maximum so far": lambda m, x: m.total.assign(ops.maximum(m.total, ops.max(x))),
    "moving": lambda m, x: m.total.assign_add(0.1 * (ops.mean(x) - m.total)),
    "integer of a sum": lambda m, x: m.count.assign_add(ops.sum(x)),
    "integer of a mean": lambda m, x: m.count.assign_add(
        ops.cast(ops.mean(x), "int32")
    ),
    "first row": lambda m, x: m.total.assign_add(x[0, 0]),
    "median": lambda m, x: m.total.assign_add(ops.median(x)),
    "ranks": lambda m, x: m.total.assign_add(
        ops.sum(ops.cast(ops.argsort(x[:, 0]), "float32") * x[:, 0])
    ),
    "sum and a constant": lambda m, x: m.total.assign_add(ops.sum(x) + 1.0),
    "divided by a sum": lambda m, x: m.total.assign_add(ops.sum(x) / ops.sum(x[:, 0])),
}
