"""Torch: optimizers update weights in shards."""

from __future__ import annotations

import keras
import pytest
from harness.training import as_arrays, assert_same, state_of
from multi_worker.torch_shards import cut, fit

import keras_strategies as ks

if keras.backend.backend() != "torch":
    pytest.skip("shards of Torch", allow_module_level=True)


@pytest.mark.parametrize("name", ["SGD", "AdamW", "Nadam", "Adagrad"])
def test_optimizers_update_shards_as_ordinary_tensors(cluster, name):
    """No operation on DTensors is in an update, weight decay or sums of gradients."""

    def train(strategy):
        keras.utils.set_random_seed(3)
        with strategy.scope():
            model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
            optimizer = getattr(keras.optimizers, name)(
                0.01, gradient_accumulation_steps=2
            )
            model.compile(optimizer, "mse")
        return as_arrays({"loss": fit(model)} | state_of(model))

    expected = train(ks.OneDeviceStrategy("cpu:0"))

    def program(strategy):
        from torch.distributed.tensor import DTensor

        from keras_strategies.engines.torch.model_parallel import unsharded_ops

        seen = set()
        original = unsharded_ops.UnshardedOps.__torch_dispatch__

        def dispatched(self, func, types, args=(), kwargs=None):
            if any(issubclass(kind, DTensor) for kind in types):
                seen.add(str(func))
            return original(self, func, types, args, kwargs)

        unsharded_ops.UnshardedOps.__torch_dispatch__ = dispatched
        try:
            found = train(cut())
        finally:
            unsharded_ops.UnshardedOps.__torch_dispatch__ = original
        return found, sorted(seen)

    for found, seen in cluster(program):
        assert_same(expected, found, 1e-5, name)
        assert "aten.detach.default" in seen
        on_lists = {op for op in seen if "foreach" in op}
        # Gradients that have been summed are set to zero.
        assert on_lists <= {"aten._foreach_mul_.Scalar"}


def test_slots_that_are_made_outside_of_the_scope(cluster):
    """They are no shards, and are updated with the weights' full values."""

    def train(strategy):
        keras.utils.set_random_seed(3)
        with strategy.scope():
            model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
        optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
        optimizer.build(model.trainable_variables)
        with strategy.scope():
            model.compile(optimizer, "mse")
        return as_arrays({"loss": fit(model)} | state_of(model))

    expected = train(ks.OneDeviceStrategy("cpu:0"))

    def program(strategy):
        return train(cut())

    for found in cluster(program):
        assert_same(expected, found, 1e-5, "fsdp")
