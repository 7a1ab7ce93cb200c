"""Torch: `compile(jit_compile=True)` on one device is Keras's own.

Replicas' layer calls are compiled otherwise: `tests/compiled_calls`.
"""

from __future__ import annotations

import warnings

import keras
import numpy as np
import pytest
from keras import layers

import keras_strategies as ks

if keras.backend.backend() != "torch":
    pytest.skip("tests of the Torch backend", allow_module_level=True)

import torch

X = np.random.default_rng(0).normal(size=(7, 3)).astype("float32")
Y = np.random.default_rng(1).normal(size=(7, 1)).astype("float32")


def trained(strategy, **options):
    """Weights and predictions, and the warnings about `jit_compile`."""
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((3,)), layers.Dense(4, "tanh"), layers.Dense(1)]
        )
        model.compile("sgd", "mse", **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model.fit(X, Y, batch_size=4, shuffle=False, verbose=0)
        model.evaluate(X, Y, batch_size=4, verbose=0)
        predicted = model.predict(X, batch_size=4, verbose=0)
    said = [w for w in caught if "`jit_compile=True`" in str(w.message)]
    return [predicted, *model.get_weights()], said


@pytest.fixture
def compiled(monkeypatch) -> list[object]:
    """The functions that Keras passes to `torch.compile`, and that run as they are.

    Steps that TorchDynamo traces are a case of `tests/exactness/test_exactness.py`.
    """
    found: list[object] = []

    def kept(function):
        found.append(function)
        return function

    monkeypatch.setattr(torch, "compile", kept)
    return found


def test_one_device_and_eager_steps_are_without_a_warning(compiled) -> None:
    _, said = trained(ks.MirroredStrategy(["cpu:0", "cpu:1"]))
    assert not said
    assert not compiled
    _, said = trained(ks.OneDeviceStrategy("cpu:0"), jit_compile=True)
    assert not said
    assert len(compiled) == 3
