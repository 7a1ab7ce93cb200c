"""Numbers of parts: those that the same rows have on one device without others."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import keras_strategies as ks

if keras.backend.backend() != "torch":
    pytest.skip("tests of the Torch backend", allow_module_level=True)

import torch


def test_a_part_is_bit_for_bit_its_rows_alone() -> None:
    """A convolution of one row has another kernel: spectrograms differ by 3e-6.

    So Keras's test of `STFTSpectrogram`, which compares two programs within 1e-6, fails
    on replicas; on one device the rows of the same parts differ as much.
    """
    audio = np.random.RandomState(41).uniform(-1, 1, (3, 4000, 1)).astype("float32")

    def model() -> keras.Model:
        layer = keras.layers.STFTSpectrogram(mode="psd")
        return keras.Sequential([keras.Input((None, 1)), layer])

    alone = model()
    with ks.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        split = model()
    found = split.predict(audio, verbose=0)
    parts = [alone.predict(part, verbose=0) for part in (audio[:2], audio[2:])]
    np.testing.assert_array_equal(found, np.concatenate(parts))
    np.testing.assert_allclose(found, alone.predict(audio, verbose=0), 1e-5, 1e-7)


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
