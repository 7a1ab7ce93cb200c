"""Custom loops in Torch's own words."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import torch
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


def test_replicas_differ_where_a_function_first_draws_in_a_later_call(mirrored):
    draws = False
    with mirrored.scope():
        seed = keras.random.SeedGenerator(3)

    def fn(x: Any) -> Any:
        return keras.random.uniform((len(x),), seed=seed) if draws else x

    keras.utils.set_random_seed(3)
    x = ks.PerReplica([torch.zeros(8), torch.zeros(8)])
    for _ in range(2):
        mirrored.run(fn, args=(x,))
    draws = True
    found = [part for _ in range(3) for part in mirrored.run(fn, args=(x,)).values]
    assert len({str(part.tolist()) for part in found}) == 6


def test_a_number_and_a_tensor_are_not_one_sum(mirrored):
    def fn(value: Any) -> Any:
        context = ks.get_replica_context()
        is_first = context.replica_id_in_sync_group == 0
        return context.all_reduce("SUM", 1.0 if is_first else value)

    with pytest.raises(ks.errors.ReplicaMismatchError, match="all_reduce of a number"):
        mirrored.run(fn, args=(torch.ones(()),))
