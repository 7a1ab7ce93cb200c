"""Torch: layers on replicas that are built from shapes, lack memory or gradients."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import torch
from keras import layers

import keras_strategies as ks

ALONE, REPLICAS = ["cpu:0"], ["cpu:0", "cpu:1"]


def assert_trains_as_one_device(train) -> None:
    """Compares the weights that `train(strategy)` returns."""
    found = [train(ks.MirroredStrategy(devices)) for devices in (ALONE, REPLICAS)]
    for expected, own in zip(*found, strict=True):
        np.testing.assert_allclose(own, expected, rtol=1e-5, atol=1e-6)


class Large(layers.Layer):
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
    with ks.MirroredStrategy(REPLICAS).scope():
        model = keras.Sequential([keras.Input((3,)), Large(), layers.Dense(1)])
        model.compile("sgd", "mse")
    if not at_first:
        model.train_on_batch(x, x[:, :1])
    monkeypatch.setattr(Large, "needs_more", True)
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 9 GiB"):
        model.train_on_batch(x, x[:, :1])


# Variables that are read or assigned without gradients before they have one.


class Read(layers.Dense):
    """Divides by the norm of its kernel, which has no gradient."""

    def call(self, x):
        with torch.no_grad():
            norm = torch.linalg.norm(self.kernel.value)
        return super().call(x) / norm


class Assigned(layers.Dense):
    """Clips its kernel before each use."""

    def call(self, x):
        with torch.no_grad():
            self.kernel.assign(keras.ops.clip(self.kernel.value, -0.3, 0.3))
        return super().call(x)


def rows():
    rng = np.random.default_rng(0)
    return tuple(rng.normal(size=(22, n)).astype("float32") for n in (8, 4))


def by_fit(strategy, model):
    x, y = rows()
    model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)


def by_run(strategy, model):
    model.optimizer.build(model.trainable_variables)

    def step(x, y):
        def loss_of():
            return keras.ops.sum((model(x, training=True) - y) ** 2) / 22

        _, gradients = ks.value_and_grad(loss_of, model.trainable_variables)()
        model.optimizer.apply(gradients, model.trainable_variables)

    for _ in range(3):
        for batch in strategy.experimental_distribute_dataset(rows(), batch_size=22):
            strategy.run(step, args=batch)


@pytest.mark.parametrize("train_by", [by_fit, by_run])
@pytest.mark.parametrize("layer", [Read, Assigned])
@pytest.mark.filterwarnings("ignore:Layer .* cannot be split")
def test_without_gradients(layer, train_by):
    def train(strategy):
        keras.utils.set_random_seed(3)
        with strategy.scope():
            hidden = layer(8, "tanh")
            model = keras.Sequential([keras.Input((8,)), hidden, layers.Dense(4)])
            model.compile(keras.optimizers.SGD(0.1), "mse")
        train_by(strategy, model)
        return model.get_weights()

    assert_trains_as_one_device(train)
