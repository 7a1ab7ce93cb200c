"""Torch: code around layers computes with weights in shards."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from harness.training import as_arrays, assert_same
from multi_worker.torch_shards import cut, fit

import keras_strategies as ks

if keras.backend.backend() != "torch":
    pytest.skip("shards of Torch", allow_module_level=True)


#: By the kind of operation, a number of a weight of shape (8, 4). Rows are divided.
OPERATIONS = {
    "entries": lambda w, torch: (w * w.abs() + 0.5 * w).sum(),
    "comparison": lambda w, torch: torch.where(w > 0.1, w, -w).sum(),
    "another of its shape": lambda w, torch: (w * full(torch)).sum(),
    "a row for all": lambda w, torch: (w * full(torch)[:1]).sum(),
    "sum of rows": lambda w, torch: (w.sum(0) ** 2).max(),
    "mean": lambda w, torch: w.mean(),
    "norm": lambda w, torch: torch.linalg.vector_norm(w),
    "product": lambda w, torch: (w.T @ w).diagonal().sum(),
    "shape": lambda w, torch: (w.reshape(4, 8)[1] * w.flatten()[:8]).sum(),
    "order": lambda w, torch: (w.sort(0).values * full(torch)).sum(),
    "rows by number": lambda w, torch: (w[torch.tensor([5, 0, 5])] ** 3).sum(),
    "joined": lambda w, torch: torch.cat([w, 2 * w[:3]]).square().mean(),
    "gradient of a gradient": lambda w, torch: slope(w, torch).square().sum(),
}


def full(torch):
    return torch.arange(32.0).reshape(8, 4) / 7


def slope(w, torch):
    (found,) = torch.autograd.grad((w**3).sum(), w, create_graph=True)
    return found


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_and_its_gradient(cluster, name):
    def program(strategy):
        import torch

        with (strategy or cut()).scope():
            kernel = keras.layers.Dense(4, use_bias=False)
            kernel.build((None, 8))
            kernel.set_weights([np.random.default_rng(1).normal(size=(8, 4)) / 3])
            value = kernel.kernel.value
            if strategy is None:
                own = value.to_local().shape
                assert own == (4, 4), own
            result = OPERATIONS[name](value, torch)
            (gradient,) = torch.autograd.grad(result, value)
            found = keras.ops.convert_to_numpy(result.detach())
            return as_arrays((found, keras.ops.convert_to_numpy(gradient)))

    expected = program(ks.OneDeviceStrategy("cpu:0"))
    for found in cluster(lambda strategy: program(None)):
        assert_same(expected, found, 1e-6, name)


def test_random_numbers_are_drawn_for_the_full_weight(cluster):
    def program(strategy):
        import torch

        with (strategy or cut()).scope():
            kernel = keras.layers.Dense(4, use_bias=False)
            kernel.build((None, 8))
            torch.manual_seed(5)
            return keras.ops.convert_to_numpy(torch.rand_like(kernel.kernel.value))

    expected = program(ks.OneDeviceStrategy("cpu:0"))
    for found in cluster(lambda strategy: program(None)):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("clip", ["clipnorm", "global_clipnorm", "clipvalue"])
@pytest.mark.parametrize("name", ["Adafactor", "Muon", "Lamb", "SGD"])
def test_an_optimizer_of_full_weights(cluster, name, clip):
    def train(strategy):
        keras.utils.set_random_seed(3)
        with strategy.scope():
            model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
            optimizer = getattr(keras.optimizers, name)(0.01, **{clip: 0.02})
            model.compile(optimizer, "mse")
        return as_arrays({"loss": fit(model), "weights": model.get_weights()})

    expected = train(ks.OneDeviceStrategy("cpu:0"))
    for found in cluster(lambda strategy: train(cut())):
        assert_same(expected, found, 1e-5, name)
