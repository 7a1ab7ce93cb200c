"""Torch: the batches of `fit` are on an accelerator before their step."""

from __future__ import annotations

import contextlib

import keras
import numpy as np
import pytest

import keras_strategies as ks
from keras_strategies.engines.torch.cuda_batches import CudaMover

X = np.random.default_rng(0).normal(size=(11, 3)).astype("float32")
Y = X.sum(1, keepdims=True)


@pytest.mark.gpu
def test_fit_on_a_gpu_gets_its_batches_there():
    places = set()

    class Noting(keras.layers.Layer):
        def call(self, x):
            places.add(str(x.device))
            return x

    results = []
    for place in (False, True):
        strategy = ks.OneDeviceStrategy("gpu:0")
        assert isinstance(strategy.drivers.fit.placer._move, CudaMover)
        if not place:
            strategy.drivers.fit.placer = None
        keras.utils.set_random_seed(0)
        with strategy.scope():
            model = keras.Sequential([Noting(), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        model.fit(X, Y, batch_size=4, epochs=3, shuffle=False, verbose=0)
        results.append(model.get_weights())
    # A proof runs the layer on tensors without values.
    assert places - {"meta"} == {"cuda:0"}
    for plain, ahead in zip(*results, strict=True):
        np.testing.assert_allclose(plain, ahead, rtol=1e-6)


def test_draws_after_a_generator_are_those_of_keras():
    """To begin a pass draws from Torch's generator, from which dropout draws."""

    def batches():
        while True:
            for start in range(0, 11, 4):
                yield X[start : start + 4], Y[start : start + 4]

    def trained(scope):
        keras.utils.set_random_seed(0)
        with scope:
            model = keras.Sequential(
                [keras.Input((3,)), keras.layers.Dropout(0.5), keras.layers.Dense(1)]
            )
            model.compile("sgd", "mse", metrics=["mae"])
        model.fit(batches(), steps_per_epoch=3, epochs=2, verbose=0)
        return model.get_weights()

    expected = trained(contextlib.nullcontext())
    for devices in (["cpu:0"], ["cpu:0", "cpu:1"]):
        strategy = ks.MirroredStrategy(devices, random_numbers="keras")
        for one, other in zip(expected, trained(strategy.scope()), strict=True):
            np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-6)
