"""Trainings in which the first rows hide how a layer depends on the batch.

A term is zero in the first epoch, a capacity is not reached, a table has as many rows
as the last batch. Each is trained without a strategy and on two and three replicas.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

from keras_strategies.keras_compat.backends.keras_on_tensorflow import (
    step_is_traced_for_batches,
)
from row_proofs.case_layers import OwnModel
from row_proofs.proofs import assert_exact

BACKEND = keras.backend.backend()
RANDOM = np.random.default_rng(7)
X = RANDOM.normal(size=(44, 4)).astype("float32")
Y = RANDOM.normal(size=(44, 1)).astype("float32")
#: 10 rows, as many as the last of three batches of 17.
TABLE = RANDOM.normal(size=(10, 4)).astype("float32")
BATCH = 17
#: Later batches have larger values.
X[BATCH:] *= 4


class Layer(layers.Layer):
    """A layer with the weights of a square matrix."""

    def build(self, *shapes: Any) -> None:
        self.kernel = self.add_weight(shape=(4, 4), name="kernel")
        self.built = True


# Added losses.


class AnnealedSum(Layer):
    def build(self, *shapes: Any) -> None:
        super().build()
        self.beta = self.add_weight(
            shape=(), initializer="zeros", trainable=False, name="beta"
        )

    def call(self, inputs: Any) -> Any:
        hidden = ops.matmul(inputs, self.kernel)
        self.add_loss(self.beta * 1e-2 * ops.sum(ops.square(hidden)))
        return hidden


# Mixing of rows.


class ZeroTimesMean(Layer):
    """The branch's scale is trained from zero."""

    def build(self, *shapes: Any) -> None:
        super().build()
        self.scale = self.add_weight(shape=(4,), initializer="zeros", name="scale")

    def call(self, inputs: Any) -> Any:
        hidden = ops.matmul(inputs, self.kernel)
        return hidden + self.scale * (hidden - ops.mean(hidden, axis=0))


class Capacity(Layer):
    """Experts drop rows of large batches only."""

    def call(self, inputs: Any) -> Any:
        chosen = ops.one_hot(ops.argmax(ops.matmul(inputs, self.kernel), -1), 4)
        place = ops.cumsum(chosen, axis=0) * chosen
        return inputs * ops.cast(ops.sum(place, -1, keepdims=True) <= 5, "float32")


class Events(Layer):
    """Counts in a float and an integer variable."""

    def build(self, *shapes: Any) -> None:
        super().build()
        options = {"shape": (), "initializer": "zeros", "trainable": False}
        self.total = self.add_weight(name="total", **options)
        self.count = self.add_weight(name="count", dtype="int32", **options)

    def call(self, inputs: Any) -> Any:
        found = ops.sum(ops.cast(inputs > 4.0, "int32"))
        self.count.assign(self.count + found)
        self.total.assign(self.total + ops.cast(found, "float32"))
        return ops.matmul(inputs, self.kernel)


def around(kind: Callable[[], Any]) -> keras.Model:
    return keras.Sequential([keras.Input((4,)), kind(), layers.Dense(1)])


class WithLoss(OwnModel):
    """A subclassed model with a loss of its own."""

    def compute_loss(self, x: Any, y: Any, y_pred: Any, *_: Any, **__: Any) -> Any:
        return self.loss_of(x, y, y_pred)


class PythonOutput(WithLoss):
    def call(self, inputs: Any) -> Any:
        return self.head(self.inner(inputs)), inputs.shape[0]

    def loss_of(self, x: Any, y: Any, y_pred: Any) -> Any:
        found, rows = y_pred
        return ops.sum(ops.square(found - y)) / (1 if rows is None else rows)


class Codebook(WithLoss):
    """An output without a batch axis, as long as the part of a replica."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = self.add_weight(shape=(9, 4), name="codes")

    def call(self, inputs: Any) -> Any:
        return self.inner(inputs), self.codes * 1.0

    def loss_of(self, x: Any, y: Any, y_pred: Any) -> Any:
        found, codes = y_pred
        near = ops.logsumexp(ops.matmul(found, ops.transpose(codes)), -1)
        return ops.mean(near) + ops.mean(ops.square(found - y))


class TwoViews(WithLoss):
    """Two rows of output for each row."""

    def call(self, inputs: Any) -> Any:
        return self.inner(ops.concatenate([inputs, inputs * 0.9], 0))

    def loss_of(self, x: Any, y: Any, y_pred: Any) -> Any:
        return ops.mean(ops.square(ops.matmul(y_pred, ops.transpose(y_pred)) - 1))


class Interleaved(WithLoss):
    """Two rows of output for each row, beside each other."""

    def call(self, inputs: Any) -> Any:
        both = ops.stack([inputs, inputs * 0.9], 1)
        return self.inner(ops.reshape(both, (-1, 4)))

    loss_of = TwoViews.loss_of


class Prototypes(WithLoss):
    """An argument without a batch axis, as long as the last batch."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = Attend()
        self.attend.built = True

    def loss_of(self, x: Any, y: Any, y_pred: Any) -> Any:
        near = self.attend(self.inner(x), ops.convert_to_tensor(TABLE))
        return ops.mean(ops.square(self.head(near) - y))


class Attend(layers.Layer):
    def call(self, inputs: Any, table: Any) -> Any:
        near = ops.softmax(ops.matmul(inputs, ops.transpose(table)))
        return inputs + ops.matmul(near, table)


class Modes(WithLoss):
    """An int argument, and which argument is given."""

    def __init__(self) -> None:
        super().__init__()
        self.mode = Mode()
        self.mode.built = True

    def loss_of(self, x: Any, y: Any, y_pred: Any) -> Any:
        hidden = self.inner(x)
        found = self.mode(hidden, mode=0) + self.mode(hidden, mode=1)
        found += self.mode(hidden, None) + self.mode(None, hidden)
        return ops.mean(ops.square(self.head(found / 8) - y))


class Mode(layers.Layer):
    def call(self, first: Any = None, second: Any = None, mode: int = 0) -> Any:
        if first is None:
            return second - ops.max(second, 0)
        return first - ops.mean(first, 0) if mode else first


def saturated(activation: str) -> keras.Model:
    scaled = layers.Rescaling(30.0)
    last = layers.Dense(3 if activation == "softmax" else 1, activation)
    return keras.Sequential([keras.Input((4,)), scaled, last])


_LAYERS = AnnealedSum, ZeroTimesMean, Capacity, Events
_MODELS = PythonOutput, Codebook, TwoViews, Interleaved, Prototypes, Modes
MODELS: dict[str, Callable[[], keras.Model]] = {
    **{kind.__name__: (lambda kind=kind: around(kind)) for kind in _LAYERS},
    **{kind.__name__: kind for kind in _MODELS},
    "softmax": lambda: saturated("softmax"),
    "sigmoid": lambda: saturated("sigmoid"),
}
LOSSES = {
    "softmax": "sparse_categorical_crossentropy",
    "sigmoid": "binary_crossentropy",
}
#: Computed by replicas, without a warning.
_SPLIT = "AnnealedSum ZeroTimesMean Events Codebook Interleaved softmax sigmoid"
SPLIT = _SPLIT.split()
if BACKEND == "tensorflow":
    # A table is the same for all replicas.
    SPLIT.append("Prototypes")
    if not step_is_traced_for_batches(steps_per_execution=1):
        # A program for any number of rows sees None as their number.
        SPLIT.append("PythonOutput")


def changed_later(model: keras.Model) -> keras.callbacks.Callback:
    def change(epoch: int, logs: Any) -> None:
        for layer in model.layers:
            if isinstance(layer, AnnealedSum):
                layer.beta.assign(float(epoch))

    return keras.callbacks.LambdaCallback(on_epoch_begin=change)


# Three replicas differ from two by an uneven batch for each pair of them.
@pytest.mark.one_backend
@pytest.mark.parametrize("replicas", [3, pytest.param(2, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", MODELS)
def test_numbers_are_those_of_one_device(name: str, replicas: int) -> None:
    targets = Y
    if name in LOSSES:
        classes = 3 if name == "softmax" else 2
        targets = (np.abs(X[:, 0]) * 7).astype("int32") % classes

    def make() -> keras.Model:
        model = MODELS[name]()
        model.compile(keras.optimizers.SGD(0.004), LOSSES.get(name, "mse"))
        return model

    def fit(model: keras.Model) -> Any:
        options = {"epochs": 3, "shuffle": False, "verbose": 0}
        return model.fit(X, targets, BATCH, callbacks=[changed_later(model)], **options)

    said = assert_exact(make, fit, replicas)
    assert BACKEND == "jax" or bool(said) == (name not in SPLIT), said
