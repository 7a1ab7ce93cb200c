"""Numbers of parts: those that the same rows have on one device without others."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import keras_strategies as ks

if keras.backend.backend() != "torch":
    pytest.skip("tests of the Torch backend", allow_module_level=True)

import torch


class Large(keras.layers.Layer):
    """A layer whose call needs more memory than there is from some batch on."""

    needs_more = False

    def call(self, x):
        if Large.needs_more and x.device.type != "meta":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.")
        return 2 * x


@pytest.mark.parametrize("at_first", [False, True])
def test_a_layer_without_memory_raises_its_own_error(monkeypatch, at_first) -> None:
    """It is no reason to compute the global batch on one device."""
    x = np.ones((6, 3), "float32")
    with ks.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        model = keras.Sequential([keras.Input((3,)), Large(), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    if not at_first:
        model.train_on_batch(x, x[:, :1])
    monkeypatch.setattr(Large, "needs_more", True)
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 9 GiB"):
        model.train_on_batch(x, x[:, :1])
