"""Custom loops in Torch's own words."""

from __future__ import annotations

import operator
from typing import Any

import keras
import numpy as np
import pytest
import torch
from keras import layers, ops
from torch.overrides import TorchFunctionMode

import keras_strategies as ks
from keras_strategies.engines.torch.devices import DeviceName

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


def test_arguments_on_the_device_of_a_replica_are_not_moved(mirrored):
    class Recorded(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func is torch.Tensor.to and args[1:] == (str(args[0].device),):
                return args[0]  # Keras 3.16 asks for it and moves nothing.
            names = [arg for arg in args if isinstance(arg, str)]
            called.append((func, *names))
            return func(*args, **(kwargs or {}))

    called: list[tuple[Any, ...]] = []

    def fn(x: Any) -> Any:
        with Recorded():
            return ops.matmul(ops.relu(x), ops.ones((2, 3)))

    x = ks.PerReplica([torch.ones(4, 2), torch.ones(3, 2)])
    strategy = ks.OneDeviceStrategy("cpu:0")
    found = [*mirrored.run(fn, args=(x,)).values, strategy.run(fn, args=(x.values[0],))]
    assert (torch.matmul,) in called
    assert (torch.Tensor.to, "cpu") not in called
    assert [tuple(each.shape) for each in found] == [(4, 3), (3, 3), (4, 3)]


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


def test_the_name_of_a_device_equals_the_device():
    name = DeviceName(torch.device("cpu"))
    device = torch.zeros(1).device
    assert name == "cpu"
    assert name == device
    assert operator.ne(device, name) is False
    assert name != "cuda"
    assert name != torch.device("cuda:0")
    assert {name: 1}["cpu"] == 1
    assert torch.zeros(2, device=name).device == device
