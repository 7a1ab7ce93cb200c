"""Layers with code of the framework that `ks.row_wise` declares are split, exactly."""

from __future__ import annotations

import re
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

import keras_strategies as ks
from row_proofs import proofs
from row_proofs.proofs import STATE, Function, Make, Own

TORCH = proofs.BACKEND == "torch"
if proofs.BACKEND == "jax":
    pytest.skip("JAX does not split layer calls", allow_module_level=True)

pytestmark = pytest.mark.one_backend("torch", "tensorflow")
if TORCH:
    import torch

    tanh, mean, matmul = torch.tanh, torch.mean, torch.matmul
    dropout = torch.nn.functional.dropout
else:
    import tensorflow as tf

    tanh, mean, matmul, dropout = tf.tanh, tf.reduce_mean, tf.matmul, tf.nn.dropout

X = proofs.normal(21, 6, seed=5)
Y = np.random.default_rng(5).integers(0, 3, 21)
ROWS: list[Any] = []  # Of the calls of layers; None in a program for any number.


def dense(layer: Own, x: Any) -> Any:
    return tanh(matmul(x, layer.kernel.value))


def wrong_center(x: Any) -> Any:
    return x - mean(x, 0, True)


def wrong(layer: Own, x: Any) -> Any:
    return wrong_center(matmul(x, layer.kernel.value))


def drawing(layer: Own, x: Any) -> Any:
    return dense(layer, x) + 0.1 * dropout(x, 0.5)


class Raw(Own):
    """A dense layer, its regularizer and a running mean, by framework functions."""

    def __init__(self, function: Function = dense) -> None:
        super().__init__(function, kernel=(6, 6), seen={**STATE, "shape": (6,)})

    def call(self, inputs: Any, training: bool = False) -> Any:
        ROWS.append(inputs.shape[0])
        found = self.function(self, inputs)
        if training:
            self.add_loss(0.1 * mean(found * found))
            self.seen.assign(0.9 * self.seen.value + 0.1 * mean(found, 0))
        return found


Declared = ks.row_wise(type("Declared", (Raw,), {}))


@ks.row_wise
class OneRow(Raw):
    def call(self, inputs: Any) -> Any:
        kept = inputs + 0.0 * matmul(inputs, self.kernel.value)[:1]
        return kept, mean(dense(self, inputs), 0, True)


class WithCall(Declared):
    def call(self, inputs: Any, training: bool = False) -> Any:
        return super().call(inputs, training)


def model_of(layer: Any) -> keras.Model:
    inputs = keras.Input((6,))
    x = layer(layers.Dense(6, activation="tanh")(inputs))
    x = x[0] + x[1] if isinstance(x, (list, tuple)) else x
    return keras.Model(inputs, layers.Dense(3, activation="softmax")(x))


class Chain(keras.Model):
    """Calls its layers one after the other: each call is split by itself."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.parts = layers.Dense(6, "tanh"), layer, layers.Dense(3, "softmax")
        for part in self.parts:
            part.build((None, 6))
        self.built = True

    def call(self, inputs: Any, training: bool = False) -> Any:
        first, layer, last = self.parts
        return last(layer(first(inputs), training=training))


def check(
    make: Make, around: Any = model_of, eagerly: bool = False, tolerance: float = 1e-5
) -> list[str]:
    loss, more = "sparse_categorical_crossentropy", {"momentum": 0.9}
    made = proofs.compiled(
        lambda: ROWS.clear() or around(make()), 0.1, loss, run_eagerly=eagerly, **more
    )
    return proofs.assert_exact(made, proofs.fits(X, Y, 21, epochs=3), 2, tolerance)


def were_split() -> bool:
    """Whether replicas were called, and all rows at most twice: to build."""
    # Unsplit calls warn.
    return None in ROWS or ({10, 11} <= set(ROWS) and ROWS.count(21) <= 2)


@ks.row_wise
def declared_tanh(x: Any) -> Any:
    ROWS.append(x.shape[0])
    return tanh(x)


FUNCTIONS: dict[str, Function] = {
    "activation": lambda f: layers.Dense(6, activation=f),
    "lambda": lambda f: layers.Lambda(f, output_shape=(6,)),
    "activation layer": layers.Activation,
}
SPLIT: dict[str, Make] = {
    "layer": lambda: ks.row_wise(Raw()),
    "layer in a layer": lambda: Own(lambda o, x: ops.relu(o.inner(x)) + x, Declared()),
    **{n: (lambda of=of: of(declared_tanh)) for n, of in FUNCTIONS.items()},
}
_WRONG = r"declared with `ks.row_wise`, but its rows depend on one another"
#: What makes a layer, and what warnings say of it.
UNSPLIT: dict[str, tuple[Make, str]] = {
    "undeclared": (Raw, "or declare the layer with `ks.row_wise`"),
    "wrong": (lambda: Declared(wrong), rf"\(Declared\).*{_WRONG}.*differs by up to"),
    "draws": (lambda: Declared(drawing), "draws"),
    "rows": (OneRow, "output 1 has 1 rows for 6 rows of the arguments"),
    "subclass": (WithCall, "is not Keras"),
    **{
        n: (lambda f=f: f(ks.row_wise(wrong_center)), f"'wrong_center'.*{_WRONG}")
        for n, f in FUNCTIONS.items()
    },
}
if TORCH:

    class Counted(torch.nn.Sequential):
        def forward(self, x: Any) -> Any:
            ROWS.append(x.shape[0])
            return super().forward(x[:, None])

    def wrapped(normalizes: bool) -> Any:
        """A small convolutional net; with batch normalization it mixes rows."""
        torch.manual_seed(4)
        normalization = [torch.nn.BatchNorm1d(4)] * normalizes
        parts = torch.nn.Conv1d(1, 4, 3, padding=1), torch.nn.ReLU(), *normalization
        net = Counted(*parts, torch.nn.Flatten(), torch.nn.Linear(24, 6))
        return ks.row_wise(layers.TorchModuleWrapper(net, output_shape=(None, 6)))

    SPLIT["module"] = lambda: wrapped(False)
    UNSPLIT["module"] = (lambda: wrapped(True), "depend on one another")


REFUSED = [*((each, model_of) for each in UNSPLIT), ("wrong", Chain)]


@pytest.mark.one_backend("torch")
@pytest.mark.parametrize("eagerly", [False, True])
@pytest.mark.parametrize("around", [model_of, Chain])
def test_declared_class_is_split(around: Any, eagerly: bool) -> None:
    assert not check(Declared, around, eagerly)
    assert were_split(), ROWS


@pytest.mark.one_backend("torch")
@pytest.mark.parametrize("name", SPLIT)
def test_declared_is_split(name: str) -> None:
    assert not check(SPLIT[name])
    assert were_split(), ROWS
    assert declared_tanh.__name__ == "declared_tanh"


@pytest.mark.one_backend("torch", "tensorflow")
@pytest.mark.parametrize(("name", "around"), REFUSED)
def test_others_are_refused(name: str, around: Any) -> None:
    make, text = UNSPLIT[name]
    # On TensorFlow two trainings draw other numbers, also on one device.
    said = check(make, around, tolerance=1.0 if name == "draws" and not TORCH else 1e-5)
    assert said and all(re.search(text, each, re.DOTALL) for each in said), said


@pytest.mark.parametrize("value", [3, dict, keras.losses.Dice])
def test_other_objects_are_refused(value: Any) -> None:
    with pytest.raises(TypeError, match=r"takes a subclass of `keras.layers.Layer` or"):
        ks.row_wise(value)


@ks.row_wise
def squares(y_true: Any, y_pred: Any) -> Any:
    ROWS.append(y_pred.shape[0])
    return mean((y_pred - y_true) * (y_pred - y_true), -1)


def test_declared_loss_is_split() -> None:
    make = proofs.compiled(
        lambda: ROWS.clear() or proofs.sequential(layers.Dense(6)), 0.1, squares
    )
    said = proofs.assert_exact(make, proofs.fits(X, X, 21, epochs=3), tolerance=1e-6)
    assert not said and were_split(), ROWS
