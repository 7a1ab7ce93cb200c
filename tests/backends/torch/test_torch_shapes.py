"""Keras on Torch: a model is built from shapes, without a batch in memory."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras import layers
from keras.src.backend.common.symbolic_scope import in_symbolic_scope

import keras_strategies as ks

if keras.backend.backend() != "torch":
    pytest.skip("for Torch", allow_module_level=True)


class Seen(layers.Layer):
    """What it is called with before the first step."""

    def __init__(self):
        super().__init__()
        self.devices: list[str] = []

    def call(self, x):
        if in_symbolic_scope():
            self.devices.append(x.device.type)
        return x


def trained(strategy) -> list[np.ndarray]:
    keras.utils.set_random_seed(0)
    with strategy.scope():
        seen = Seen()
        model = keras.Sequential(
            [
                keras.Input((4, 4, 3)),
                layers.Conv2D(3, 3),
                layers.UpSampling2D((2, 3)),
                seen,
                layers.GlobalAveragePooling2D(),
                layers.Dense(2),
            ]
        )
        model.compile(keras.optimizers.SGD(0.01), "mse")
    seen.devices.clear()
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(10, 4, 4, 3)), rng.normal(size=(10, 2))
    model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0)
    assert set(seen.devices) == {"meta"}
    return model.get_weights()


def test_upsampling_is_built_from_shapes_alone() -> None:
    """Keras 3.15 raises on the device "meta", and computes all rows of the batch."""
    expected = trained(ks.OneDeviceStrategy("cpu:0"))
    found = trained(ks.MirroredStrategy(["cpu:0", "cpu:1"]))
    for a, b in zip(expected, found, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
