"""The three models that benchmarks train, with data that they are trained on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Workload:
    """A model, and how much of it is one measurement.

    Args:
        name: str.
        build: makes the model; its last layer gives logits of 10 classes.
        example: makes so many rows of input.
        batch: int, rows of the global batch.
        steps: int, steps of one measured epoch.
    """

    name: str
    build: Callable[[], Any]
    example: Callable[[np.random.Generator, int], np.ndarray]
    batch: int
    steps: int

    def data(self) -> tuple[np.ndarray, np.ndarray]:
        random = np.random.default_rng(0)
        rows = self.batch * self.steps
        return self.example(random, rows), random.integers(0, 10, rows)

    def compiled(self) -> Any:
        import keras

        keras.utils.set_random_seed(0)
        model = self.build()
        model.compile(
            keras.optimizers.SGD(0.01),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
        return model


def convolutional() -> Any:
    import keras
    from keras import layers

    conv = {"kernel_size": 3, "activation": "relu", "padding": "same"}
    return keras.Sequential(
        [
            keras.Input((32, 32, 3)),
            layers.Conv2D(32, **conv),
            layers.Conv2D(32, **conv),
            layers.MaxPooling2D(),
            layers.Conv2D(64, **conv),
            layers.Conv2D(64, **conv),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(128, activation="relu"),
            layers.Dense(10),
        ]
    )


def perceptron() -> Any:
    import keras
    from keras import layers

    hidden = [layers.Dense(64, activation="relu") for _ in range(10)]
    return keras.Sequential([keras.Input((64,)), *hidden, layers.Dense(10)])


def transformer() -> Any:
    import keras
    from keras import layers

    tokens = keras.Input((64,), dtype="int32")
    x = layers.Embedding(1000, 128)(tokens)
    for _ in range(2):
        attended = layers.MultiHeadAttention(4, 32)(x, x)
        x = layers.LayerNormalization()(x + attended)
        fed = layers.Dense(256, activation="relu")(x)
        x = layers.LayerNormalization()(x + layers.Dense(128)(fed))
    x = layers.GlobalAveragePooling1D()(x)
    return keras.Model(tokens, layers.Dense(10)(x))


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload(
            "convolutional",
            convolutional,
            lambda r, n: r.random((n, 32, 32, 3), dtype="float32"),
            batch=128,
            steps=5,
        ),
        Workload(
            "mlp",
            perceptron,
            lambda r, n: r.random((n, 64), dtype="float32"),
            batch=256,
            steps=150,
        ),
        Workload(
            "transformer",
            transformer,
            lambda r, n: r.integers(0, 1000, (n, 64), dtype="int32"),
            batch=64,
            steps=10,
        ),
    )
}


def stateless_step(
    model: Any, optimizer: Any, loss_of: Callable[..., Any]
) -> Callable[[Any, Any, Any], Any]:
    """A training step on JAX by hand, of the model's stateless call.

    Args:
        model: Keras model, built.
        optimizer: Keras optimizer, built.
        loss_of: the loss of labels and outputs.

    Returns:
        A function of the state, which is the values of trainable, other and optimizer
        variables, and of a batch; it returns the next state and the loss.
    """
    import jax

    def loss_fn(trainable: Any, rest: Any, x: Any, y: Any) -> Any:
        scores, rest = model.stateless_call(trainable, rest, x, training=True)
        return loss_of(y, scores), rest

    def step(state: Any, x: Any, y: Any) -> Any:
        trainable, rest, slots = state
        (loss, rest), gradients = jax.value_and_grad(loss_fn, has_aux=True)(
            trainable, rest, x, y
        )
        trainable, slots = optimizer.stateless_apply(slots, gradients, trainable)
        return (trainable, rest, slots), loss

    return step
