"""Central storage on JAX: one copy of the variables, steps in two programs."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras import layers

import keras_strategies as ks

if keras.backend.backend() != "jax":
    pytest.skip("tests of the JAX backend", allow_module_level=True)

import jax
from backends.jax.jax_training import (
    STRATEGIES,
    assert_same,
    rows,
    scope_of,
    small_model,
)

ks.set_virtual_cpu_devices(4)


class Uses(keras.Model):
    """A step of one's own, with an update that it goes on to use."""

    def __init__(self, use, **kwargs):
        super().__init__(**kwargs)
        self.dense = layers.Dense(1)
        self.use = use

    def call(self, x):
        return self.dense(x)

    def train_step(self, state, data):
        trainable, non_trainable, optimizer, metrics = state
        x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
        gradient = jax.value_and_grad(self.compute_loss_and_updates, has_aux=True)
        (loss, _), gradients = gradient(
            trainable,
            non_trainable,
            metrics,
            x,
            y,
            weights,
            training=True,
            optimizer_variables=optimizer,
        )
        apply = self.optimizer.stateless_apply
        if self.use == "before":
            trainable = [value * 0.5 for value in trainable]
        new, new_optimizer = apply(optimizer, gradients, trainable)
        logs = {"loss": loss}
        if self.use == "times":
            new = [value * 0.5 for value in new]
        if self.use == "call":
            output, _ = self.stateless_call(new, non_trainable, x)
            logs["output"] = jax.numpy.mean(output)
        if self.use == "twice":
            new, new_optimizer = apply(new_optimizer, gradients, new)
        if self.use == "slots":
            logs["slots"] = sum(jax.numpy.sum(value) for value in optimizer)
        return logs, (new, non_trainable, new_optimizer, metrics)


@pytest.mark.nightly(unless=["call-False"])
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("use", ["before", "times", "call", "twice", "slots"])
def test_central_storage_runs_any_step(use, eager):
    x, y = rows(16)

    def fitted(strategy):
        with scope_of(strategy):
            keras.utils.set_random_seed(1)
            model = Uses(use)
            optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
            model.compile(optimizer, "mse", run_eagerly=eager)
        history = model.fit(x, y, batch_size=8, epochs=2, verbose=0, shuffle=False)
        model.evaluate(x, y, batch_size=8, verbose=0)
        return {"weights": model.get_weights(), **history.history}

    assert_same(fitted(STRATEGIES["central"]()), fitted(None))


@pytest.mark.parametrize("name", ["mirrored_2", "central", "model_2x1"])
def test_trainable_changes_without_compile(name):
    """As in Keras: the optimizer has other variables, and `compile` makes a new one."""
    strategies = {
        **STRATEGIES,
        "model_2x1": lambda: ks.ModelParallelStrategy(
            "fsdp", ["cpu:0", "cpu:1"], min_shard_bytes=0
        ),
    }
    x, y = rows(8)
    messages = []
    for strategy in (None, strategies[name]()):
        with scope_of(strategy):
            model = small_model()
        model.fit(x, y, batch_size=8, verbose=0)
        model.layers[1].trainable = False
        frozen = model.layers[1].kernel.numpy()
        with pytest.raises(ValueError, match="optimizer was built with") as caught:
            model.fit(x, y, batch_size=8, verbose=0)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
    with scope_of(strategy):
        model.compile(keras.optimizers.SGD(0.1), "mse")
    model.fit(x, y, batch_size=8, verbose=0)
    np.testing.assert_array_equal(model.layers[1].kernel.numpy(), frozen)
