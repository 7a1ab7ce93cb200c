"""Models whose layers look at the whole batch, or that few other recipes resemble.

Experts with a capacity, a statistic of the minibatch, CTC in a layer, augmentation in
the model, captions, segmentation.
"""

from __future__ import annotations

import math
from typing import Any

import keras
import numpy as np
from harness.data import Data
from keras import layers, ops

from field.compare import FieldCase
from field.recipes.common import crossentropy, digits, images_only, ready, sgd, stack
from field.recipes.generative import HingeGAN, painter
from field.recipes.sequences import LENGTH, VOCABULARY, Block, Positions, judged, words


class SwitchExperts(layers.Layer):
    """Experts that take the first tokens of a batch up to a capacity.

    As in "Switch Transformers" (Fedus et al., 2022): tokens beyond the capacity are
    zero, and a loss balances the experts over the batch.
    """

    def __init__(self, experts: int, width: int, capacity: int) -> None:
        super().__init__()
        self.experts, self.width, self.capacity = experts, width, capacity
        self.router = layers.Dense(experts)

    def build(self, shape: Any) -> None:
        self.router.build((None, shape[-1]))
        options = {"initializer": "glorot_uniform"}
        inner, outer = (shape[-1], self.width), (self.width, shape[-1])
        self.inner = self.add_weight(shape=(self.experts, *inner), **options)
        self.outer = self.add_weight(shape=(self.experts, *outer), **options)

    def call(self, inputs: Any) -> Any:
        tokens = ops.reshape(inputs, (-1, inputs.shape[-1]))
        chance = ops.softmax(self.router(tokens))
        chosen = ops.one_hot(ops.argmax(chance, axis=-1), self.experts)
        balance = ops.sum(ops.mean(chosen, axis=0) * ops.mean(chance, axis=0))
        self.add_loss(0.1 * self.experts * balance)
        place = ops.cumsum(chosen, axis=0) * chosen
        slots = ops.arange(1, self.capacity + 1, dtype=place.dtype)
        dispatch = ops.cast(place[..., None] == slots, place.dtype)
        given = ops.einsum("tec,td->ecd", dispatch, tokens)
        hidden = ops.relu(ops.einsum("ecd,edw->ecw", given, self.inner))
        found = ops.einsum("ecw,ewd->ecd", hidden, self.outer)
        gates = dispatch * ops.max(chance, axis=-1)[:, None, None]
        outputs = ops.einsum("tec,ecd->td", gates, found)
        return ops.reshape(outputs, ops.shape(inputs))


class SwitchBlock(layers.Layer):
    """Attention, and experts in place of the feed-forward part."""

    def __init__(self, width: int, experts: int, capacity: int) -> None:
        super().__init__()
        self.attention = layers.MultiHeadAttention(2, width // 2)
        self.experts = SwitchExperts(experts, 2 * width, capacity)
        self.first, self.second = (layers.LayerNormalization() for _ in range(2))

    def call(self, x: Any) -> Any:
        x = self.first(x + self.attention(x, x))
        return self.second(x + self.experts(x))


def switch_transformer(
    vocabulary: int = VOCABULARY,
    length: int = LENGTH,
    width: int = 8,
    blocks: int = 1,
    experts: int = 3,
    tokens: int = 24,
) -> keras.Model:
    """A classifier of texts, as in the example of Keras.

    Args:
        tokens: int, the tokens of a batch, from which the capacity follows.
    """
    ids = keras.Input((length,), dtype="int32")
    x = Positions()(layers.Embedding(vocabulary, width)(ids))
    for _ in range(blocks):
        x = SwitchBlock(width, experts, math.ceil(tokens / experts))(x)
    hidden = layers.Dense(width, "relu")(layers.GlobalAveragePooling1D()(x))
    return ready(
        keras.Model(ids, layers.Dense(1)(hidden)),
        sgd(0.2),
        keras.losses.BinaryCrossentropy(from_logits=True),
    )


class MinibatchDeviation(layers.Layer):
    """The deviation over the batch as another channel, as in StyleGAN."""

    def call(self, inputs: Any) -> Any:
        deviation = ops.sqrt(ops.var(inputs, axis=0) + 1e-8)
        mean = ops.mean(deviation) * ops.ones_like(inputs[..., :1])
        return ops.concatenate([inputs, mean], axis=-1)


def style_critic() -> keras.Model:
    return stack(
        (8, 8, 1),
        layers.Conv2D(4, 3, strides=2, padding="same"),
        layers.LeakyReLU(),
        MinibatchDeviation(),
        layers.Conv2D(4, 3, padding="same"),
        layers.LeakyReLU(),
        layers.Flatten(),
        layers.Dense(1),
    )


class LossOfLetters(layers.Layer):
    """Adds the CTC loss of frames and a text, as in the example of captchas."""

    def call(self, text: Any, frames: Any) -> Any:
        ones = ops.ones_like(text[:, 0])
        lengths = [ones * text.shape[1], ones * frames.shape[1]]
        self.add_loss(ops.mean(ops.ctc_loss(text, frames, *lengths)))
        return frames


def captchas(rows: int) -> Data:
    letters = np.random.default_rng(6).integers(1, 5, (rows, 2)).astype("int32")
    return Data({"image": digits(rows).x, "text": letters}, None)


def captcha_reader() -> keras.Model:
    image = keras.Input((8, 8, 1), name="image")
    text = keras.Input((2,), dtype="int32", name="text")
    x = layers.Conv2D(4, 3, padding="same", activation="relu")(image)
    x = layers.Reshape((8, 32))(layers.Permute((2, 1, 3))(x))
    x = layers.Bidirectional(layers.LSTM(4, return_sequences=True))(x)
    outputs = LossOfLetters()(text, layers.Dense(5)(x))
    return ready(keras.Model({"image": image, "text": text}, outputs), sgd(0.02))


def augmented() -> keras.Model:
    """Augmentation layers before a small network, as in guides of Keras."""
    model = stack(
        (8, 8, 1),
        layers.RandomFlip("horizontal", seed=1),
        layers.RandomContrast(0.2, seed=2),
        layers.Conv2D(4, 3, activation="relu"),
        layers.Flatten(),
        layers.Dropout(0.2, seed=3),
        layers.Dense(10),
    )
    return ready(model, loss=crossentropy())


def captions(rows: int) -> Data:
    text = words(rows)
    return Data({"image": digits(rows).x, "text": text}, np.roll(text, -1, 1))


class Decoder(Block):
    """A block that also attends to parts of an image."""

    def __init__(self, width: int) -> None:
        super().__init__(width, causal=True)
        self.seen = layers.MultiHeadAttention(2, width // 2)
        self.third = layers.LayerNormalization()

    def call(self, x: Any, image: Any, training: bool = False) -> Any:
        x = super().call(x, training=training)
        return self.third(x + self.seen(x, image, training=training))


def captioner() -> keras.Model:
    image = keras.Input((8, 8, 1), name="image")
    text = keras.Input((LENGTH,), dtype="int32", name="text")
    parts = layers.Reshape((16, 8))(layers.Conv2D(8, 2, strides=2)(image))
    x = Positions()(layers.Embedding(VOCABULARY, 8, mask_zero=True)(text))
    outputs = layers.Dense(VOCABULARY)(Decoder(8)(x, parts))
    model = keras.Model({"image": image, "text": text}, outputs)
    return ready(model, sgd(0.1), crossentropy())


def masks(rows: int) -> Data:
    images = digits(rows).x
    return Data(images, (images > 0.5).astype("int32"))


def u_net() -> keras.Model:
    image = keras.Input((8, 8, 1))
    wide = layers.Conv2D(4, 3, padding="same", activation="relu")(image)
    x = layers.BatchNormalization()(layers.MaxPooling2D(2)(wide))
    x = layers.SeparableConv2D(8, 3, padding="same", activation="relu")(x)
    x = layers.Conv2DTranspose(4, 3, strides=2, padding="same")(x)
    x = layers.Concatenate()([layers.UpSampling2D(2)(layers.MaxPooling2D(2)(x)), wide])
    model = keras.Model(image, layers.Conv2D(2, 1)(x))
    return ready(model, loss=crossentropy())


CASES = [
    FieldCase("switch_transformer", switch_transformer, judged),
    FieldCase(
        "style_gan",
        lambda: ready(HingeGAN(style_critic(), painter())),
        images_only,
    ),
    FieldCase("captchas", captcha_reader, captchas),
    FieldCase("augmentation", augmented, digits),
    FieldCase("captions", captioner, captions),
    FieldCase("u_net", u_net, masks),
]
