"""Numbers of parts: those that the same rows have on one device without others."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import keras_strategies as ks

if keras.backend.backend() != "torch":
    pytest.skip("tests of the Torch backend", allow_module_level=True)


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
