"""The models that benchmarks train, with data that they are trained on."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

# The layers of some models are those of tests.
sys.path.append(str(Path(__file__).parents[1] / "tests"))


@dataclass(frozen=True)
class Workload:
    """A model, and how much of it is one measurement.

    Args:
        name: str.
        build: makes the model; its last layer gives logits of `classes`.
        example: makes so many rows of input.
        batch: int, rows of the global batch.
        steps: int, steps of one measured epoch.
        classes: int.
        labels: tuple of int, the shape of a row's labels.
    """

    name: str
    build: Callable[[], Any]
    example: Callable[[np.random.Generator, int], np.ndarray]
    batch: int
    steps: int
    classes: int = 10
    labels: tuple[int, ...] = ()

    def data(self) -> tuple[np.ndarray, np.ndarray]:
        random = np.random.default_rng(0)
        rows = self.batch * self.steps
        x = self.example(random, rows)
        return x, random.integers(0, self.classes, (rows, *self.labels))

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


def transformer(rate: float = 0.0) -> Any:
    """A classifier of sequences.

    Args:
        rate: float, that of dropout of embeddings, attention and both branches.
    """
    import keras
    from keras import layers

    def dropped(x: Any) -> Any:
        return layers.Dropout(rate)(x) if rate else x

    tokens = keras.Input((64,), dtype="int32")
    x = dropped(layers.Embedding(1000, 128)(tokens))
    for _ in range(2):
        attended = layers.MultiHeadAttention(4, 32, dropout=rate)(x, x)
        x = layers.LayerNormalization()(x + dropped(attended))
        fed = layers.Dense(256, activation="relu")(x)
        x = layers.LayerNormalization()(x + dropped(layers.Dense(128)(fed)))
    x = layers.GlobalAveragePooling1D()(x)
    return keras.Model(tokens, layers.Dense(10)(x))


def language_model(words: int = 8192) -> Any:
    """A transformer with logits of all words for each token.

    Args:
        words: int, the size of the vocabulary.
    """
    import keras
    from keras import layers

    tokens = keras.Input((64,), dtype="int32")
    x = layers.Embedding(words, 128)(tokens)
    for _ in range(2):
        attended = layers.MultiHeadAttention(4, 32)(x, x, use_causal_mask=True)
        x = layers.LayerNormalization()(x + attended)
        fed = layers.Dense(256, activation="relu")(x)
        x = layers.LayerNormalization()(x + layers.Dense(128)(fed))
    return keras.Model(tokens, layers.Dense(words)(x))


def segmentation() -> Any:
    """Convolutions with logits of 19 classes for each pixel."""
    import keras
    from keras import layers

    conv = {"kernel_size": 3, "activation": "relu", "padding": "same"}
    images = keras.Input((64, 64, 3))
    first = layers.Conv2D(16, **conv)(images)
    x = layers.Conv2D(32, strides=2, **conv)(first)
    x = layers.Conv2D(32, **conv)(x)
    x = layers.UpSampling2D()(x)
    x = layers.Concatenate()([first, x])
    return keras.Model(images, layers.Conv2D(19, 1)(x))


def switch_transformer() -> Any:
    """Two blocks with 8 experts each, of which each takes so many tokens of a batch."""
    import math

    import keras
    from field.recipes.mixing import SwitchBlock
    from field.recipes.sequences import Positions
    from keras import layers

    experts, tokens_of_batch = 8, 1024
    tokens = keras.Input((64,), dtype="int32")
    x = Positions()(layers.Embedding(20000, 128)(tokens))
    for _ in range(2):
        x = SwitchBlock(128, experts, math.ceil(tokens_of_batch / experts))(x)
    x = layers.Dense(128, "relu")(layers.GlobalAveragePooling1D()(x))
    return keras.Model(tokens, layers.Dense(10)(x))


def critic() -> Any:
    """StyleGAN's critic, with the deviation over the batch as a feature."""
    import keras
    from field.recipes.mixing import MinibatchDeviation
    from keras import layers

    images = keras.Input((32, 32, 3))
    x = images
    for width in (64, 128, 256):
        x = layers.LeakyReLU()(layers.Conv2D(width, 3, padding="same")(x))
        x = layers.AveragePooling2D(2)(x)
    x = layers.Conv2D(256, 3, padding="same")(MinibatchDeviation()(x))
    return keras.Model(images, layers.Dense(10)(layers.Flatten()(x)))


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
            steps=20,
        ),
        Workload(
            "transformer with dropout",
            functools.partial(transformer, 0.1),
            lambda r, n: r.integers(0, 1000, (n, 64), dtype="int32"),
            batch=64,
            steps=20,
        ),
        Workload(
            "language model",
            language_model,
            lambda r, n: r.integers(0, 8192, (n, 64), dtype="int32"),
            batch=32,
            steps=4,
            classes=8192,
            labels=(64,),
        ),
        Workload(
            "language model with 32768 words",
            functools.partial(language_model, 32768),
            lambda r, n: r.integers(0, 32768, (n, 64), dtype="int32"),
            batch=16,
            steps=4,
            classes=32768,
            labels=(64,),
        ),
        Workload(
            "segmentation",
            segmentation,
            lambda r, n: r.random((n, 64, 64, 3), dtype="float32"),
            batch=16,
            steps=24,
            classes=19,
            labels=(64, 64),
        ),
    )
}

#: Models with a layer in which the rows of a batch depend on each other.
MIXING = {
    workload.name: workload
    for workload in (
        Workload(
            "switch transformer",
            switch_transformer,
            lambda r, n: r.integers(0, 20000, (n, 64), dtype="int32"),
            batch=16,
            steps=10,
        ),
        Workload(
            "StyleGAN's critic",
            critic,
            lambda r, n: r.random((n, 32, 32, 3), dtype="float32"),
            batch=32,
            steps=8,
        ),
    )
}

#: The models with one label for each row, without random numbers.
CLASSIFIERS = [
    name
    for name, each in WORKLOADS.items()
    if not each.labels and "dropout" not in name
]


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
