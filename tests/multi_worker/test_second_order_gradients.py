"""Gradients of gradients through calls of layers, as penalties, on several workers.

The second gradient comes from an unsplit call of the layer, with the random numbers of
replicas, and the state before they changed it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from field.steps import input_gradients, value_and_gradients, without_gradients
from keras import layers, ops
from multi_worker.clusters import assert_as_one_device, on_clusters

BACKEND = keras.backend.backend()
if BACKEND == "jax":
    pytest.skip("JAX differentiates one program of all rows", allow_module_level=True)
pytestmark = [
    pytest.mark.one_backend("torch"),
    pytest.mark.filterwarnings("ignore:A gradient through layer"),
]

ROWS, WIDTH, BATCH, CLASSES = 23, 6, 9, 4
_random = np.random.default_rng(4)
X = _random.normal(size=(ROWS, WIDTH)).astype("float32")
Y = _random.integers(0, CLASSES, ROWS)


class Follower(layers.Layer):
    """Reads a state, and then assigns it."""

    def build(self, shape: Any) -> None:
        options = {"initializer": "ones", "trainable": False}
        self.mean = self.add_weight(shape=(shape[-1],), **options)

    def call(self, x: Any, training: bool = False) -> Any:
        # Torch refuses to differentiate what reads the variable itself.
        found = x * (1.0 * self.mean) + x * x
        if training:
            self.mean.assign(0.5 * self.mean + 0.5 * ops.mean(x, axis=0))
        return found


class Centered(layers.Layer):
    """Mixes rows, and so is never split."""

    def call(self, x: Any) -> Any:
        return ops.tanh(x - ops.mean(x, axis=0, keepdims=True))


class Critic(keras.Model):
    """A model that is trained with a penalty on the gradient of a function of it."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.inner = keras.Sequential([keras.Input((WIDTH,)), *layers_of(name)])
        self.last = keras.Sequential(
            [keras.Input((2 * CLASSES,)), layers.Dense(CLASSES, activation="tanh")]
        )
        self.factor = self.add_weight(shape=(CLASSES,), initializer="ones")
        self.loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.mean = keras.metrics.Mean(name="mean")
        self.function = FUNCTIONS.get(name, lambda model, outputs, y: outputs)
        self.built = True

    def call(self, x: Any, training: bool = False) -> Any:
        return self.inner(x, training=training)

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data[:2]
        outputs = []

        def function(x: Any) -> Any:
            outputs.append(self.inner(x, training=True))
            return self.function(self, outputs[0], y)

        def loss_of() -> Any:
            slope = input_gradients(function, 1.5 * x)
            norm = ops.sqrt(ops.sum(slope * slope, axis=-1) + 1e-6)
            return ops.mean(ops.square(norm - 1)) + 0.1 * ops.mean(outputs[0])

        variables = self.trainable_variables
        loss, found = value_and_gradients(loss_of, variables)
        found = [
            ops.zeros_like(variable) if each is None else ops.convert_to_tensor(each)
            for variable, each in zip(variables, found, strict=True)
        ]
        with without_gradients():
            self.optimizer.apply(found, variables)
        self.mean.update_state(loss)
        return {"mean": self.mean.result()}


def with_rows(model: Critic, outputs: Any, y: Any) -> Any:
    """Differs from row to row, and is not linear."""
    rows = ops.arange(ops.shape(outputs)[0], dtype="float32")
    return ops.square(outputs) * rows[:, None] * 0.1


def of_two_calls(model: Critic, outputs: Any, y: Any) -> Any:
    """A second call of layers, of what mixes the rows of the first."""
    scaled = outputs * model.factor
    both = [scaled - ops.mean(scaled, axis=0), scaled]
    return model.last(ops.concatenate(both, axis=-1), training=True)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    # A variable that no layer has.
    "factor": lambda model, outputs, y: outputs * model.factor,
    "rows": with_rows,
    "all rows": lambda model, outputs, y: outputs * ops.sum(outputs) * 0.02,
    "two calls": of_two_calls,
    "loss": lambda model, outputs, y: 6.0 * model.loss_of(y, outputs),
    # A sum of its outputs over rows has no gradient.
    "batch statistics": with_rows,
}


def layers_of(name: str) -> list[Any]:
    first, last = layers.Dense(5, activation="tanh"), layers.Dense(CLASSES)
    between: dict[str, list[Any]] = {
        "dropout": [layers.Dropout(0.4)],
        "noise": [layers.GaussianNoise(0.3, seed=5)],
        "batch statistics": [layers.BatchNormalization(momentum=0.6)],
        "state": [Follower(), layers.Dropout(0.2)],
        "unsplit": [Centered()],
    }
    if name == "assigned kernels":
        return [
            layers.SpectralNormalization(first),
            layers.Dropout(0.2),
            layers.SpectralNormalization(last),
        ]
    return [first, *between.get(name, []), last]


CASES = [
    *("plain", *FUNCTIONS),
    *("dropout", "noise", "state", "assigned kernels", "unsplit"),
]


def trained(strategy: Any, name: str) -> dict[str, Any]:
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = Critic(name)
        model.compile(keras.optimizers.SGD(0.05, momentum=0.5))
    history = model.fit(X, Y, BATCH, epochs=2, shuffle=False, verbose=0)
    found = {f"weight {i}": value for i, value in enumerate(model.get_weights())}
    return {"loss": np.asarray(history.history["mean"]), **found}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.nightly(unless=["two-*"])
@on_clusters("two", "two_by_two")
def test_workers_train_to_the_numbers_of_one_device(cluster: Any, name: str) -> None:
    expected = assert_as_one_device(cluster, trained, name, tolerance=1e-4)
    # A penalty that has no effect would hide a wrong one.
    assert np.ptp(expected["loss"]) > 1e-3
