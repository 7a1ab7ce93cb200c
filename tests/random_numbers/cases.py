"""Models that draw random numbers, for every layer and function of Keras that does."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from keras import layers, ops

BACKEND = keras.backend.backend()
ROWS, BATCH = 29, 12
_RANDOM = np.random.default_rng(3)
#: Inputs by the number of axes; batches of 12, 12 and 5 rows.
INPUTS = {
    2: _RANDOM.normal(size=(ROWS, 4)).astype("float32"),
    3: _RANDOM.normal(size=(ROWS, 5, 4)).astype("float32"),
    4: _RANDOM.uniform(size=(ROWS, 8, 8, 3)).astype("float32"),
}
TARGETS = _RANDOM.normal(size=(ROWS, 2)).astype("float32")


@dataclass(frozen=True)
class Case:
    """One model.

    Args:
        name: str.
        make: makes the layer that draws.
        rank: int, the axes of its inputs.
    """

    name: str
    make: Callable[[], layers.Layer]
    rank: int = 2

    @property
    def is_split(self) -> bool:
        """Whether replicas call it, without a warning."""
        return self.name.partition("-none")[0] not in UNSPLIT[BACKEND]

    def model(self) -> keras.Model:
        inputs = keras.Input(INPUTS[self.rank].shape[1:])
        hidden = inputs if self.rank == 4 else layers.Dense(4)(inputs)
        hidden = layers.Flatten()(self.make()(hidden))
        return keras.Model(inputs, layers.Dense(2)(hidden))


# Keras's layers.


def stacked() -> layers.Layer:
    return layers.RNN(
        [layers.LSTMCell(3, dropout=0.3, seed=1), layers.GRUCell(3, dropout=0.2)]
    )


class Attended(layers.Layer):
    """Self-attention."""

    def __init__(self, attention: layers.Layer) -> None:
        super().__init__()
        self.attention = attention

    def _twice(self, given: Any) -> Any:
        """The arguments for it, of which `Attention` takes a list."""
        is_listed = isinstance(self.attention, layers.Attention)
        return [[given, given]] if is_listed else [given, given]

    def build(self, shape: Any) -> None:
        self.attention.build(*self._twice(shape))

    def call(self, inputs: Any, training: bool = False) -> Any:
        return self.attention(*self._twice(inputs), training=training)


def image_layers() -> dict[str, Callable[[], layers.Layer]]:
    scale: dict[str, Any] = {"value_range": (0, 1)}
    return {
        "RandomFlip": lambda: layers.RandomFlip(seed=1),
        "RandomRotation": lambda: layers.RandomRotation(0.2, seed=1),
        "RandomZoom": lambda: layers.RandomZoom(0.2, seed=1),
        "RandomTranslation": lambda: layers.RandomTranslation(0.2, 0.2, seed=1),
        "RandomCrop": lambda: layers.RandomCrop(8, 8, seed=1),
        "RandomContrast": lambda: layers.RandomContrast(0.5, seed=1),
        "RandomBrightness": lambda: layers.RandomBrightness(0.5, seed=1, **scale),
        "RandomBrightness-of-others": lambda: keras.Sequential(
            [
                layers.Rescaling(0.5),
                layers.RandomRotation(0.2, seed=1),
                layers.RandomBrightness(0.5, seed=1, **scale),
                layers.RandomColorJitter(brightness_factor=0.4, seed=2, **scale),
            ]
        ),
        "RandomErasing": lambda: layers.RandomErasing(seed=1, **scale),
        "RandomGaussianBlur": lambda: layers.RandomGaussianBlur(seed=1, **scale),
    }


class Mixed(layers.Layer):
    """Mixes images with those of other rows."""

    def __init__(self, mixing: layers.Layer) -> None:
        super().__init__()
        self.mixing = mixing

    def call(self, inputs: Any, training: bool = False) -> Any:
        labels = ops.ones((rows_of(inputs), 2))
        data = {"images": inputs, "labels": labels}
        return self.mixing(data, training=training)["images"]

    def compute_output_shape(self, input_shape: Any) -> Any:
        # On JAX, Keras cannot infer it: a shuffle needs a number of rows.
        return input_shape


def more_image_layers() -> dict[str, Callable[[], layers.Layer]]:
    """Those whose draws have the shapes of others."""
    scale: dict[str, Any] = {"value_range": (0, 1), "seed": 1}
    return {
        "RandomColorJitter": lambda: layers.RandomColorJitter(
            brightness_factor=0.4, contrast_factor=0.3, **scale
        ),
        "RandomHue": lambda: layers.RandomHue(0.3, **scale),
        "RandomSaturation": lambda: layers.RandomSaturation(0.3, **scale),
        "RandomSharpness": lambda: layers.RandomSharpness(0.3, **scale),
        "RandomPosterization": lambda: layers.RandomPosterization(3, **scale),
        "RandomGrayscale": lambda: layers.RandomGrayscale(0.5, seed=1),
        "RandomShear": lambda: layers.RandomShear(0.2, 0.2, seed=1),
        "RandomPerspective": lambda: layers.RandomPerspective(seed=1),
        "RandomInvert": lambda: layers.RandomInvert(0.5, **scale),
        "RandomColorDegeneration": lambda: layers.RandomColorDegeneration(0.5, **scale),
        "RandomElasticTransform": lambda: layers.RandomElasticTransform(seed=1),
        "RandAugment": lambda: layers.RandAugment(**scale),
        "AugMix": lambda: layers.AugMix(**scale),
        "MixUp": lambda: Mixed(layers.MixUp(seed=1)),
        "CutMix": lambda: Mixed(layers.CutMix(seed=1)),
    }


_BOTH: dict[str, Any] = {"dropout": 0.3, "recurrent_dropout": 0.3, "seed": 1}
LAYERS: dict[str, tuple[Callable[[], layers.Layer], int]] = {
    "Dropout": (lambda: layers.Dropout(0.4, seed=1), 2),
    "Dropout-no-seed": (lambda: layers.Dropout(0.4), 2),
    "Dropout-shared": (lambda: layers.Dropout(0.4, noise_shape=(1, 4), seed=1), 2),
    "Dropout-shape": (lambda: layers.Dropout(0.4, noise_shape=(None, 1)), 2),
    "SpatialDropout1D": (lambda: layers.SpatialDropout1D(0.4, seed=1), 3),
    "SpatialDropout2D": (lambda: layers.SpatialDropout2D(0.4), 4),
    "GaussianDropout": (lambda: layers.GaussianDropout(0.4, seed=1), 2),
    "GaussianNoise": (lambda: layers.GaussianNoise(0.4, seed=1), 3),
    "AlphaDropout": (lambda: layers.AlphaDropout(0.4, seed=1), 2),
    "SimpleRNN": (lambda: layers.SimpleRNN(3, **_BOTH), 3),
    "LSTM": (lambda: layers.LSTM(3, **_BOTH), 3),
    "GRU": (lambda: layers.GRU(3, dropout=0.3), 3),
    "Bidirectional": (lambda: layers.Bidirectional(layers.LSTM(2, dropout=0.3)), 3),
    "RNN": (stacked, 3),
    "TimeDistributed": (lambda: layers.TimeDistributed(layers.Dropout(0.4, seed=1)), 3),
    "Attention": (lambda: Attended(layers.Attention(dropout=0.3, seed=1)), 3),
    "MultiHeadAttention": (
        lambda: Attended(layers.MultiHeadAttention(2, 2, dropout=0.3, seed=1)),
        3,
    ),
    **{name: (make, 4) for name, make in image_layers().items()},
    **{name: (make, 4) for name, make in more_image_layers().items()},
}


# Functions of `keras.random` in a layer of a user's.


class Draws(layers.Layer):
    """Adds what a function draws."""

    def __init__(self, draw: Callable[[Any, Any], Any], seed: Any = None) -> None:
        super().__init__()
        self.draw = draw
        self.seed = seed

    def call(self, inputs: Any, training: bool = False) -> Any:
        return inputs + self.draw(inputs, self.seed) if training else inputs


def rows_of(inputs: Any) -> Any:
    return ops.shape(inputs)[0]


def _two_draws(inputs: Any, seed: Any) -> Any:
    """Rows, none, and several entries for each row, as long as part of a batch."""
    first = keras.random.uniform(ops.shape(inputs), seed=seed)
    shared = keras.random.normal((6, 4), seed=seed)
    many = keras.random.uniform((rows_of(inputs) * 3, 4), seed=seed)
    many = ops.reshape(many, (-1, 3, 4))
    return first + ops.mean(shared, 0) + ops.mean(many, 1)


def of_the_framework(x: Any) -> Any:
    """A draw that is not one of `keras.random`, as long as the rows."""
    if BACKEND == "torch":
        import torch

        return torch.rand(len(x), 4)
    if BACKEND == "jax":
        import jax

        return jax.random.uniform(jax.random.key(3), (rows_of(x), 4))
    import tensorflow as tf

    return tf.random.stateless_uniform((rows_of(x), 4), (3, 4))


FUNCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "normal": lambda x, seed: keras.random.normal(ops.shape(x), 1.0, 2.0, seed=seed),
    "uniform": lambda x, seed: keras.random.uniform(ops.shape(x), -1, 2, seed=seed),
    "truncated_normal": lambda x, seed: keras.random.truncated_normal(
        ops.shape(x), seed=seed
    ),
    "randint": lambda x, seed: (
        ops.cast(keras.random.randint((rows_of(x), 4), 0, 9, seed=seed), "float32") / 9
    ),
    "categorical": lambda x, seed: ops.cast(
        keras.random.categorical(ops.log(ops.softmax(x)), 4, seed=seed), "float32"
    ),
    "dropout": lambda x, seed: keras.random.dropout(x, 0.5, seed=seed),
    "gamma": lambda x, seed: keras.random.gamma((rows_of(x), 4), 0.7, seed=seed),
    "gamma-of-rows": lambda x, seed: keras.random.gamma(
        (rows_of(x), 4), ops.abs(ops.stop_gradient(x)) + 0.1, seed=seed
    ),
    "binomial": lambda x, seed: keras.random.binomial(
        (rows_of(x), 4), 9.0, 0.3, seed=seed
    ),
    "beta": lambda x, seed: keras.random.beta((rows_of(x), 4), 0.4, 0.6, seed=seed),
    "shuffle": lambda x, seed: keras.random.shuffle(x, seed=seed),
    "mixup": lambda x, seed: ops.take(
        x, ops.argsort(keras.random.uniform((rows_of(x),), seed=seed)), axis=0
    ),
    "shared": lambda x, seed: keras.random.normal((4,), seed=seed),
    "shared-as-long": lambda x, seed: ops.sum(
        keras.random.normal((6, 4), seed=seed), 0
    ),
    "several": _two_draws,
    "python": lambda x, seed: random.random(),
    "framework": lambda x, seed: of_the_framework(x),
}
#: Not split: rows are mixed, how many numbers are drawn depends on parameters of each
#: row, Python or the framework draws, or operations have no rule.
_MIXING = (
    *(f"{name}-generator" for name in ("shuffle", "mixup", "python", "framework")),
    *("MixUp", "CutMix", "RandAugment", "AugMix", "RandomElasticTransform"),
)
#: Keras raises for them in a compiled step, with a strategy and without one.
REFUSED = {"jax": ("RandomElasticTransform",)}
UNSPLIT: dict[str, tuple[str, ...]] = {
    "jax": (),
    "tensorflow": _MIXING,
    "torch": (
        *_MIXING,
        # Keras changes its input in place.
        "RandomBrightness",
        "RandomBrightness-of-others",
        "RandomColorJitter",
    ),
}
SEEDS: dict[str, Callable[[], Any]] = {
    "generator": lambda: keras.random.SeedGenerator(5),
    "int": lambda: 3,
    "none": lambda: None,
}


def drawing(name: str, seed: str) -> Case:
    draw = FUNCTIONS[name]
    return Case(f"{name}-{seed}", lambda: Draws(draw, SEEDS[seed]()))


CASES = [
    *(Case(name, make, rank) for name, (make, rank) in LAYERS.items()),
    *(drawing(name, "generator") for name in FUNCTIONS),
    *(drawing(name, "int") for name in ("normal", "several")),
]
if BACKEND != "jax":  # Keras refuses draws without a seed in a traced step.
    CASES += [drawing(name, "none") for name in ("normal", "several", "dropout")]
