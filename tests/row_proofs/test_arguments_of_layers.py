"""Layers of Keras's that mix rows by an argument, and code that is not Keras's.

Each is trained without a strategy and on two and three replicas.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from harness.training import assert_same
from keras import layers, ops

import keras_strategies as ks
from row_proofs.proofs import needs_split, trained

pytestmark = pytest.mark.one_backend("torch", "tensorflow")

BACKEND = keras.backend.backend()
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(25, 6)).astype("float32") * np.linspace(0.3, 2, 25)[:, None]
X = (X + np.linspace(-1, 1, 25)[:, None]).astype("float32")
Y = np.sin(X[:, :1])


class Center(layers.Layer):
    def call(self, x: Any) -> Any:
        return x - ops.max(x, axis=0, keepdims=True)


class Squeeze(layers.Layer):
    """Drops all axes with one entry, the rows too where there is one."""

    def compute_output_spec(self, x: Any) -> Any:
        return keras.KerasTensor(x.shape[:1], x.dtype)

    def call(self, x: Any) -> Any:
        return ops.squeeze(x)


class Chunks(layers.Layer):
    """A number that is the same for few rows."""

    def call(self, x: Any) -> Any:
        chunks = ops.shape(x)[0] // 7 + 1
        return x / ops.cast(chunks, x.dtype)


class Mask(layers.Layer):
    """Columns before the number of rows."""

    def call(self, x: Any) -> Any:
        return x * ops.cast(ops.arange(6) < ops.shape(x)[0], x.dtype)


class OfFramework(layers.Layer):
    def call(self, x: Any) -> Any:
        if BACKEND == "torch":
            import torch

            return x + torch.mean(x, 0, keepdim=True)
        import tensorflow as tf

        return x / tf.cast(tf.shape(x)[0] // 7 + 1, x.dtype)


def around(*inner: Any) -> keras.Model:
    return keras.Sequential([keras.Input((6,)), *inner, layers.Dense(1)])


def attending(kind: Any) -> keras.Model:
    inputs = keras.Input((6,))
    both = [layers.Dense(4)(inputs), layers.Dense(4)(inputs)]
    return keras.Model(inputs, layers.Dense(1)(kind()(both)))


def pooling() -> keras.Model:
    """Attention over the rows of a batch, which is a bag."""
    inputs = keras.Input((6,))
    hidden = layers.Dense(4, "tanh")(inputs)
    scores = layers.Activation("softmax")(layers.Reshape(())(layers.Dense(1)(hidden)))
    pooled = layers.Multiply()([hidden, layers.Reshape((1,))(scores)])
    return keras.Model(inputs, layers.Dense(1)(pooled))


MODELS: dict[str, Callable[[], keras.Model]] = {
    "layer as activation": lambda: around(layers.Dense(6, activation=Center())),
    "attention of rank 2": lambda: attending(layers.Attention),
    "softmax of rank 1": pooling,
    "softmax over all axes": lambda: around(layers.Dense(6), layers.Softmax(axis=None)),
    "computes with the number of rows": lambda: around(layers.Dense(6), Chunks()),
    "compares with the number of rows": lambda: around(layers.Dense(6), Mask()),
    "function of the framework": lambda: around(layers.Dense(6), OfFramework()),
}
#: As on one device, Keras fails or computes something else in a program.
EAGER = ("computes with the number of rows", "compares with the number of rows")


def compiled(make: Callable[[], Any], **options: Any) -> Callable[[], Any]:
    def made() -> Any:
        model = make()
        model.compile(keras.optimizers.SGD(0.003), "mse", **options)
        return model

    return made


def assert_same_on_replicas(make: Any, fit: Any, is_split: bool = False) -> None:
    alone = ks.OneDeviceStrategy("cpu:0") if BACKEND == "torch" else None
    expected, _ = trained(make, fit, alone)
    found, said = trained(make, fit, ks.MirroredStrategy(["cpu:0", "cpu:1"]))
    assert_same(expected, found, 2e-5, "two replicas")
    assert bool(said) != is_split, said


@pytest.mark.one_backend("torch")
@needs_split
@pytest.mark.parametrize("name", MODELS)
def test_arguments_that_mix_rows(name: str) -> None:
    def fit(model: Any) -> Any:
        return model.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0)

    # A program of TensorFlow sees no number of rows.
    is_eager = BACKEND == "tensorflow" and name in EAGER
    options = {"run_eagerly": True} if is_eager else {}
    assert_same_on_replicas(compiled(MODELS[name], **options), fit)


@pytest.mark.one_backend("torch", "tensorflow")
@needs_split
@pytest.mark.parametrize("name", ["Squeeze", "Mask"])
@pytest.mark.parametrize("batch", [2, 3])
def test_one_row_on_each_replica(name: str, batch: int) -> None:
    if BACKEND == "tensorflow" and name == "Mask":
        pytest.skip("tested with `run_eagerly`")
    kinds = {"Squeeze": Squeeze, "Mask": Mask}

    def make() -> Any:
        inputs = keras.Input((6,))
        last = [layers.Dense(1), kinds[name]()]
        if name != "Squeeze":
            last.reverse()
        outputs = last[1](last[0](layers.Dense(6)(inputs)))
        return keras.Model(inputs, outputs)

    def fit(model: Any) -> Any:
        targets = Y[:12, 0] if name == "Squeeze" else Y[:12]
        return model.fit(X[:12], targets, batch_size=batch, shuffle=False, verbose=0)

    assert_same_on_replicas(compiled(make), fit)


@needs_split
def test_classes_along_the_rows_of_a_metric() -> None:
    def make() -> Any:
        metric = keras.metrics.OneHotMeanIoU(8, axis=0, name="iou")
        model = keras.Sequential([keras.Input((6,)), layers.Dense(3)])
        model.compile(keras.optimizers.SGD(0.01), "mse", metrics=[metric])
        return model

    def fit(model: Any) -> Any:
        return model.fit(X[:24], X[:24, :3], batch_size=8, shuffle=False, verbose=0)

    assert_same_on_replicas(make, fit, is_split=True)


@pytest.mark.one_backend("tensorflow")
@pytest.mark.skipif(BACKEND != "tensorflow", reason="numbers of TensorFlow")
def test_warning_does_not_promise_numbers_of_tensorflow() -> None:
    import tensorflow as tf

    class Noise(layers.Layer):
        def call(self, x: Any) -> Any:
            return x * (1 + tf.random.normal(()) / 5)

    def fit(model: Any) -> Any:
        return model.fit(X, Y, batch_size=8, shuffle=False, verbose=0)

    make = compiled(lambda: around(layers.Dense(6), Noise()))
    _, said = trained(make, fit, ks.MirroredStrategy(["cpu:0", "cpu:1"]))
    assert len(said) == 1
    assert "exact but for numbers that the code draws by `tf.random`" in said[0]
