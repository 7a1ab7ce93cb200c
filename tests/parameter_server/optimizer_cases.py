"""Keras's optimizers, and a model that they update."""

from __future__ import annotations

import keras
import numpy as np
from keras import optimizers

from parameter_server import clusters

BATCH, STEPS, ROWS = 8, 4, 30


class ScheduleFree(optimizers.ScheduleFreeAdamW):
    """Keras's on one device, with the momentum that it had before the update.

    On Torch and TensorFlow `momentum.value` is what `assign_sub` writes into, so that
    Keras 3.15 takes the new momentum twice there; on JAX, and on servers, it does not.
    """

    def update_step(self, gradient, variable, learning_rate):
        momentum = self._momentums[self._get_variable_index(variable)]
        before = keras.ops.copy(momentum.value)
        super().update_step(gradient, variable, learning_rate)
        if keras.backend.backend() != "jax":
            step = keras.ops.cast(self.iterations + 1, variable.dtype)
            moved = keras.ops.subtract(momentum, before)
            self.assign_add(variable, (1 - 1 / step) * (1 - self.beta_1) * moved)


OPTIMIZERS = {
    "adadelta": lambda: optimizers.Adadelta(1.0),
    "accumulating": lambda: optimizers.Adam(
        0.05, gradient_accumulation_steps=2, use_ema=True, ema_overwrite_frequency=3
    ),
    "adamax": lambda: optimizers.Adamax(0.05),
    "adamw": lambda: optimizers.AdamW(0.05, amsgrad=True),
    "ftrl": lambda: optimizers.Ftrl(0.5, l1_regularization_strength=0.01),
    "lamb": lambda: optimizers.Lamb(0.05),
    "lion": lambda: optimizers.Lion(0.01),
    "muon": lambda: optimizers.Muon(0.05),
    # It has a variable of its own that every update changes.
    "nadam": lambda: optimizers.Nadam(0.05, gradient_accumulation_steps=2),
    "rmsprop": lambda: optimizers.RMSprop(0.05, momentum=0.5, centered=True),
    "schedule_free": lambda: optimizers.ScheduleFreeAdamW(0.05, warmup_steps=3),
    "sgd": lambda: optimizers.SGD(0.1, momentum=0.5, nesterov=True),
}
# Optimizers that update a table as on one device also with lazy rows.
COMPLETE_WITH_LAZY_ROWS = {
    "accumulation": lambda: optimizers.SGD(0.1, gradient_accumulation_steps=2),
    "average": lambda: optimizers.SGD(
        0.1, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=4
    ),
    "lamb": lambda: optimizers.Lamb(0.05),
    "muon": lambda: optimizers.Muon(0.05, exclude_embeddings=False),
}
# What one device is given instead.
REFERENCES = {"schedule_free": lambda: ScheduleFree(0.05, warmup_steps=3)}


def build(optimizer):
    keras.utils.set_random_seed(1)
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((3,), dtype="int32"),
            layers.Embedding(ROWS, 4, name="embedding"),
            layers.Flatten(),
            layers.Dense(6, "tanh", name="hidden"),
            layers.Dense(1),
        ]
    )
    model.compile(optimizer, "mse")
    return model


def assert_equal(ours, theirs) -> None:
    """Weights, slots, steps and learning rates are the same."""
    for found, expected in zip(ours.variables, theirs.variables, strict=True):
        np.testing.assert_allclose(
            *clusters.values([found, expected]), rtol=2e-4, atol=2e-5
        )
    assert len(ours.optimizer.variables) == len(theirs.optimizer.variables)
    for found, expected in zip(
        ours.optimizer.variables, theirs.optimizer.variables, strict=True
    ):
        np.testing.assert_allclose(
            *clusters.values([found, expected]), rtol=1e-3, atol=1e-4
        )
