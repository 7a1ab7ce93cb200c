"""Variables that are read or assigned without gradients before they have one."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import keras_strategies as ks

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(
    keras.backend.backend() != "torch", reason="gradients are Torch's"
)

REPLICAS = ["cpu:0", "cpu:1"]


class Read(keras.layers.Dense):
    """Divides by the norm of its kernel, which has no gradient."""

    def call(self, x):
        with torch.no_grad():
            norm = torch.linalg.norm(self.kernel.value)
        return super().call(x) / norm


class Assigned(keras.layers.Dense):
    """Clips its kernel before each use."""

    def call(self, x):
        with torch.no_grad():
            self.kernel.assign(keras.ops.clip(self.kernel.value, -0.3, 0.3))
        return super().call(x)


def model_with(layer):
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [keras.Input((8,)), layer(8, "tanh"), keras.layers.Dense(4)]
    )
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


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


@pytest.mark.parametrize("train", [by_fit, by_run])
@pytest.mark.parametrize("layer", [Read, Assigned])
@pytest.mark.filterwarnings("ignore:Layer .* cannot be split")
def test_training_is_that_of_one_device(layer, train):
    found = []
    for strategy in (ks.OneDeviceStrategy("cpu:0"), ks.MirroredStrategy(REPLICAS)):
        with strategy.scope():
            model = model_with(layer)
        train(strategy, model)
        found.append(model.get_weights())
    for expected, own in zip(*found, strict=True):
        np.testing.assert_allclose(own, expected, rtol=1e-5, atol=1e-6)
