"""Custom loops in Torch's own words."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

import keras_strategies as ks

if keras.backend.backend() != "torch":
    pytest.skip("Torch only", allow_module_level=True)


def test_the_backward_pass_of_torch(mirrored):
    def train(strategy: Any, x: Any) -> list[np.ndarray]:
        with strategy.scope():
            keras.utils.set_random_seed(1)
            model = keras.Sequential(
                [keras.Input((3,)), layers.Dense(4, activation="tanh"), layers.Dense(1)]
            )
            optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
            optimizer.build(model.trainable_variables)

        def replica_step(x: Any) -> Any:
            model.zero_grad()
            loss = ks.compute_average_loss(ops.square(model(x)[:, 0] - 1))
            loss.backward()
            variables = model.trainable_variables
            gradients = [variable.value.grad for variable in variables]
            optimizer.apply(gradients, variables)
            return loss

        losses = [
            float(strategy.reduce("SUM", strategy.run(replica_step, args=(x,))))
            for _ in range(4)
        ]
        return [np.array(losses), *model.get_weights()]

    x = np.random.default_rng(0).normal(size=(5, 3)).astype("float32")
    tensor = ops.convert_to_tensor(x)
    found = train(mirrored, ks.PerReplica([tensor[:3], tensor[3:]]))
    expected = train(ks.OneDeviceStrategy("cpu:0"), tensor)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
