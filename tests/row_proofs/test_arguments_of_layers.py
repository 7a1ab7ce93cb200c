"""Layers of Keras's that mix rows by an argument, and code that is not Keras's.

Each is trained on one device and on two replicas; `test_exchanged_sums.test_attacks`
has the numbers of other arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

import keras_strategies as ks
from row_proofs.proofs import assert_exact, needs_split, trained

pytestmark = pytest.mark.one_backend("torch", "tensorflow")

BACKEND = keras.backend.backend()
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(25, 6)).astype("float32") * np.linspace(0.3, 2, 25)[:, None]
X = (X + np.linspace(-1, 1, 25)[:, None]).astype("float32")
Y = np.sin(X[:, :1])


class Squeeze(layers.Layer):
    """Drops all axes with one entry, the rows too where there is one."""

    def compute_output_spec(self, x: Any) -> Any:
        return keras.KerasTensor(x.shape[:1], x.dtype)

    def call(self, x: Any) -> Any:
        return ops.squeeze(x)


class Mask(layers.Layer):
    """Columns before the number of rows."""

    def call(self, x: Any) -> Any:
        return x * ops.cast(ops.arange(6) < ops.shape(x)[0], x.dtype)


def compiled(make: Callable[[], Any], **options: Any) -> Callable[[], Any]:
    def made() -> Any:
        model = make()
        model.compile(keras.optimizers.SGD(0.003), "mse", **options)
        return model

    return made


@pytest.mark.one_backend("torch", "tensorflow")
@needs_split
@pytest.mark.parametrize("name", ["Squeeze", "Mask"])
@pytest.mark.parametrize("batch", [2, 3])
def test_one_row_on_each_replica(name: str, batch: int) -> None:
    if BACKEND == "tensorflow" and name == "Mask":
        pytest.skip("tested with `run_eagerly`")

    def make() -> Any:
        inputs = keras.Input((6,))
        is_last = name == "Squeeze"
        last = [layers.Dense(1), Squeeze()] if is_last else [Mask(), layers.Dense(1)]
        return keras.Model(inputs, last[1](last[0](layers.Dense(6)(inputs))))

    def fit(model: Any) -> Any:
        targets = Y[:12, 0] if name == "Squeeze" else Y[:12]
        return model.fit(X[:12], targets, batch_size=batch, shuffle=False, verbose=0)

    assert assert_exact(compiled(make), fit)


@needs_split
def test_classes_along_the_rows_of_a_metric() -> None:
    def make() -> Any:
        metric = keras.metrics.OneHotMeanIoU(8, axis=0, name="iou")
        model = keras.Sequential([keras.Input((6,)), layers.Dense(3)])
        model.compile(keras.optimizers.SGD(0.01), "mse", metrics=[metric])
        return model

    def fit(model: Any) -> Any:
        return model.fit(X[:24], X[:24, :3], batch_size=8, shuffle=False, verbose=0)

    assert not assert_exact(make, fit)


@pytest.mark.one_backend("tensorflow")
@pytest.mark.skipif(BACKEND != "tensorflow", reason="numbers of TensorFlow")
def test_warning_does_not_promise_numbers_of_tensorflow() -> None:
    import tensorflow as tf

    class Noise(layers.Layer):
        def call(self, x: Any) -> Any:
            return x * (1 + tf.random.normal(()) / 5)

    def fit(model: Any) -> Any:
        return model.fit(X, Y, batch_size=8, shuffle=False, verbose=0)

    hidden = layers.Dense(6), Noise(), layers.Dense(1)
    make = compiled(lambda: keras.Sequential([keras.Input((6,)), *hidden]))
    _, said = trained(make, fit, ks.MirroredStrategy(["cpu:0", "cpu:1"]))
    assert len(said) == 1
    assert "exact but for numbers that the code draws by `tf.random`" in said[0]
