"""Datasets of `fit`, which have the arrays, end with it and not with a collection."""

from __future__ import annotations

import gc

import keras
import numpy as np
import pytest

if keras.backend.backend() != "tensorflow":
    pytest.skip("tests of the TensorFlow backend", allow_module_level=True)

import keras_strategies as ks
from keras_strategies.engines.tensorflow.epoch_datasets import EpochIterator

ks.set_virtual_cpu_devices(2)


@pytest.mark.nightly(unless=["one"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: ks.OneDeviceStrategy("cpu:0"),
        lambda: ks.MirroredStrategy(["cpu:0", "cpu:1"]),
    ],
    ids=["one", "mirrored"],
)
def test_datasets_of_a_method_do_not_stay(make) -> None:
    with make().scope():
        model = keras.Sequential([keras.Input((1000,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    x, y = np.ones((500, 1000), "float32"), np.ones((500, 1), "float32")

    def methods() -> None:
        model.fit(x, y, batch_size=100, epochs=2, verbose=0)
        model.evaluate(x, y, batch_size=100, verbose=0)
        model.predict(x, batch_size=100, verbose=0)

    gc.collect()
    gc.disable()
    try:
        methods()
        alive = [each for each in gc.get_objects() if isinstance(each, EpochIterator)]
    finally:
        gc.enable()
    assert alive == []
