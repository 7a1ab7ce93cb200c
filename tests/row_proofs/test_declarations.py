"""Layers with code of the framework that `ks.row_wise` declares are split, and exact.

Each is trained without a strategy and on two replicas with uneven rows.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from harness.training import as_arrays, assert_same, state_of
from keras import layers

import keras_strategies as ks

BACKEND = keras.backend.backend()
TORCH = BACKEND == "torch"
if BACKEND == "jax":
    pytest.skip("JAX does not split layer calls", allow_module_level=True)

pytestmark = pytest.mark.one_backend("torch", "tensorflow")
if TORCH:
    import torch

    tanh, mean, matmul = torch.tanh, torch.mean, torch.matmul
    dropout = torch.nn.functional.dropout
else:
    import tensorflow as tf

    tanh, matmul = tf.tanh, tf.matmul
    dropout = tf.nn.dropout

    def mean(x: Any, axis: Any = None, keepdims: bool = False) -> Any:
        return tf.reduce_mean(x, axis, keepdims)


RANDOM = np.random.default_rng(5)
X = RANDOM.normal(size=(21, 6)).astype("float32")
Y = RANDOM.integers(0, 3, 21)


#: The rows of the calls of layers; None in a program for any number.
ROWS: list[Any] = []


class Raw(layers.Layer):
    """A dense layer, its regularizer and a running mean, by framework functions."""

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(shape[-1], 6), name="kernel")
        self.seen = self.add_weight(
            shape=(6,), name="seen", trainable=False, initializer="zeros"
        )

    def compute(self, inputs: Any) -> Any:
        return tanh(matmul(inputs, self.kernel.value))

    def call(self, inputs: Any, training: bool = False) -> Any:
        ROWS.append(inputs.shape[0])
        found = self.compute(inputs)
        if training:
            self.add_loss(0.1 * mean(found * found))
            self.seen.assign(0.9 * self.seen.value + 0.1 * mean(found, 0))
        return found


@ks.row_wise
class Declared(Raw):
    pass


@ks.row_wise
class Wrong(Raw):
    def compute(self, inputs: Any) -> Any:
        found = matmul(inputs, self.kernel.value)
        return found - mean(found, 0, True)


@ks.row_wise
class Drawing(Raw):
    def compute(self, inputs: Any) -> Any:
        return super().compute(inputs) + 0.1 * dropout(inputs, 0.5)


@ks.row_wise
class OneRow(Raw):
    """Returns one row for all."""

    def compute(self, inputs: Any) -> Any:
        return mean(super().compute(inputs), 0, True)

    def call(self, inputs: Any) -> Any:
        ROWS.append(inputs.shape[0])
        return inputs + 0.0 * matmul(inputs, self.kernel.value)[:1], self.compute(
            inputs
        )


class Outer(layers.Layer):
    """A layer of a user's around a declared one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Declared()

    def build(self, shape: Any) -> None:
        self.inner.build(shape)

    def call(self, inputs: Any, training: bool = False) -> Any:
        return keras.ops.relu(self.inner(inputs, training=training)) + inputs


def model_of(layer: Any) -> keras.Model:
    inputs = keras.Input((6,))
    x = layers.Dense(6, activation="tanh")(inputs)
    x = layer(x)
    x = x[0] + x[1] if isinstance(x, (list, tuple)) else x
    return keras.Model(inputs, layers.Dense(3, activation="softmax")(x))


class Chain(keras.Model):
    """Calls its layers one after the other: each call is split by itself."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.first, self.layer = layers.Dense(6, activation="tanh"), layer
        self.last = layers.Dense(3, activation="softmax")

    def build(self, shape: Any) -> None:
        self.first.build(shape)
        self.layer.build(shape)
        self.last.build(shape)
        self.built = True

    def call(self, inputs: Any, training: bool = False) -> Any:
        return self.last(self.layer(self.first(inputs), training=training))


def results(
    make: Callable[[], keras.Model], strategy: Any, eagerly: bool = False
) -> Any:
    keras.utils.set_random_seed(3)
    ROWS.clear()
    with (strategy or ks.OneDeviceStrategy("cpu:0")).scope():
        model = make()
        model.build((None, 6))
        model.compile(
            keras.optimizers.SGD(0.1, momentum=0.9),
            "sparse_categorical_crossentropy",
            run_eagerly=eagerly,
        )
        logs = [float(model.train_on_batch(X, Y)) for _ in range(3)]
        predicted = model.predict(X, batch_size=21, verbose=0)
    state = {**state_of(model), "logs": logs, "predicted": predicted}
    return as_arrays(state)


def check(
    make: Callable[[], keras.Model], eagerly: bool = False, tolerance: float = 1e-5
) -> list[str]:
    """Fails if two replicas give other numbers; returns the warnings."""
    expected = results(make, None, eagerly)
    strategy = ks.MirroredStrategy(["cpu:0", "cpu:1"])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = results(make, strategy, eagerly)
    assert_same(expected, found, tolerance, repr(strategy))
    return [
        str(each.message) for each in caught if "cannot be split" in str(each.message)
    ]


def were_split() -> bool:
    """Whether replicas were called, and all rows at most twice: to build."""
    if None in ROWS:
        return True  # Unsplit calls warn.
    return {10, 11} <= set(ROWS) and ROWS.count(21) <= 2


@pytest.mark.one_backend("torch")
@pytest.mark.parametrize("eagerly", [False, True])
@pytest.mark.parametrize("make", [model_of, Chain])
def test_declared_class_is_split(make: Any, eagerly: bool) -> None:
    assert not check(lambda: make(Declared()), eagerly)
    assert were_split(), ROWS


def test_declared_layer_is_split() -> None:
    assert not check(lambda: model_of(ks.row_wise(Raw())))
    assert were_split(), ROWS


def test_undeclared_layer_is_told_of_the_declaration() -> None:
    (text,) = check(lambda: model_of(Raw()))
    assert "or declare the layer with `ks.row_wise`" in text


def test_declared_layer_in_a_layer() -> None:
    assert not check(lambda: model_of(Outer()))
    assert were_split(), ROWS


@pytest.mark.one_backend("torch", "tensorflow")
@pytest.mark.parametrize("make", [model_of, Chain])
def test_wrong_declaration_is_refused(make: Any) -> None:
    texts = check(lambda: make(Wrong()))
    assert texts
    for text in texts:
        assert "declared with `ks.row_wise`, but its rows depend on one another" in text
        assert "differs by up to" in text and "(Wrong)" in text


def test_draws_of_the_framework_are_refused() -> None:
    # On TensorFlow two trainings draw other numbers, also on one device.
    texts = check(lambda: model_of(Drawing()), tolerance=1e-5 if TORCH else 1.0)
    assert texts and all("draws" in text for text in texts)


def test_other_numbers_of_rows_are_refused() -> None:
    (text,) = check(lambda: model_of(OneRow()))
    assert "output 1 has 1 rows for 6 rows of the arguments" in text


def test_subclass_with_a_call_is_not_declared() -> None:
    class Other(Declared):
        def call(self, inputs: Any, training: bool = False) -> Any:
            return super().call(inputs, training)

    (text,) = check(lambda: model_of(Other()))
    assert "is not Keras" in text


@pytest.mark.parametrize("value", [3, dict, keras.losses.Dice])
def test_other_objects_are_refused(value: Any) -> None:
    with pytest.raises(TypeError, match=r"takes a subclass of `keras.layers.Layer` or"):
        ks.row_wise(value)


@ks.row_wise
def declared_tanh(x: Any) -> Any:
    ROWS.append(x.shape[0])
    return tanh(x)


@ks.row_wise
def wrong_center(x: Any) -> Any:
    return x - mean(x, 0, True)


FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "activation": lambda f: layers.Dense(6, activation=f),
    "lambda": lambda f: layers.Lambda(f, output_shape=(6,)),
    "activation layer": layers.Activation,
}


@pytest.mark.one_backend("torch")
@pytest.mark.parametrize("where", FUNCTIONS)
def test_declared_function_is_split(where: str) -> None:
    assert not check(lambda: model_of(FUNCTIONS[where](declared_tanh)))
    assert were_split(), ROWS
    assert declared_tanh.__name__ == "declared_tanh"


@pytest.mark.one_backend("torch", "tensorflow")
@pytest.mark.parametrize("where", FUNCTIONS)
def test_wrong_function_is_refused(where: str) -> None:
    (text,) = check(lambda: model_of(FUNCTIONS[where](wrong_center)))
    assert "its rows depend on one another" in text and "'wrong_center'" in text


@ks.row_wise
def squares(y_true: Any, y_pred: Any) -> Any:
    ROWS.append(y_pred.shape[0])
    return mean((y_pred - y_true) * (y_pred - y_true), -1)


def test_declared_loss_is_split() -> None:
    def losses(strategy: Any) -> Any:
        keras.utils.set_random_seed(3)
        with strategy.scope():
            model = keras.Sequential([keras.Input((6,)), layers.Dense(6)])
            model.compile(keras.optimizers.SGD(0.1), squares)
            return [float(model.train_on_batch(X, X)) for _ in range(3)]

    expected = losses(ks.OneDeviceStrategy("cpu:0"))
    ROWS.clear()
    found = losses(ks.MirroredStrategy(["cpu:0", "cpu:1"]))
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert {10, 11} <= set(ROWS) or None in ROWS, ROWS


@pytest.mark.skipif(not TORCH, reason="torch modules")
@pytest.mark.parametrize("normalizes", [False, True])
def test_torch_module(normalizes: bool) -> None:
    """A small convolutional net; with batch normalization its rows depend on others."""

    def make() -> keras.Model:
        torch.manual_seed(4)
        parts = [torch.nn.Conv1d(1, 4, 3, padding=1), torch.nn.ReLU()]
        if normalizes:
            parts.append(torch.nn.BatchNorm1d(4))
        last = torch.nn.Linear(24, 6)
        net = torch.nn.Sequential(*parts, torch.nn.Flatten(), last)
        inputs = keras.Input((6,))
        x = layers.Reshape((1, 6))(inputs)
        wrapped = keras.layers.TorchModuleWrapper(Counted(net), output_shape=(None, 6))
        x = ks.row_wise(wrapped)(x)
        return keras.Model(inputs, layers.Dense(3, activation="softmax")(x))

    texts = check(make)
    if normalizes:
        assert texts and all("depend on one another" in text for text in texts)
    else:
        assert not texts
        assert were_split(), ROWS


if TORCH:

    class Counted(torch.nn.Module):
        def __init__(self, net: Any) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: Any) -> Any:
            ROWS.append(x.shape[0])
            return self.net(x)
