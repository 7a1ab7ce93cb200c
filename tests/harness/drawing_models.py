"""Models that draw random numbers in most of their layers, of rows of four numbers."""

from __future__ import annotations

from typing import Any

from keras import layers


class Block(layers.Layer):
    """A transformer block with dropout of attention and of both branches."""

    def __init__(self, width: int, rate: float = 0.2) -> None:
        super().__init__()
        # The gradient of a bias of keys is zero; Adam's steps are those of rounding.
        self.attention = layers.MultiHeadAttention(2, 3, dropout=rate, use_bias=False)
        self.dropouts = [layers.Dropout(rate), layers.Dropout(rate)]
        self.norms = [layers.LayerNormalization(), layers.LayerNormalization()]
        self.dense = layers.Dense(width, "gelu")

    def build(self, shape: Any) -> None:
        self.attention.build(shape, shape)
        for each in (*self.norms, self.dense):
            each.build(shape)

    def call(self, x: Any, training: bool = False) -> Any:
        found = self.attention(x, x, training=training)
        x = self.norms[0](x + self.dropouts[0](found, training=training))
        return self.norms[1](x + self.dropouts[1](self.dense(x), training=training))


def transformer() -> list[layers.Layer]:
    """Layers of a transformer over the four numbers of a row."""
    return [
        layers.Reshape((4, 1)),
        layers.Dense(6),
        layers.GaussianNoise(0.1),
        Block(6),
        layers.GlobalAveragePooling1D(),
    ]


def augmented_cnn() -> list[layers.Layer]:
    """Layers of a CNN with augmentation, on an image that is made of a row."""
    return [
        layers.Dense(6 * 6 * 3, "sigmoid"),
        layers.Reshape((6, 6, 3)),
        layers.RandomFlip(seed=3),
        layers.RandomContrast(0.4),
        layers.RandomErasing(value_range=(0, 1)),
        layers.Conv2D(4, 3, activation="relu"),
        layers.SpatialDropout2D(0.2),
        layers.GlobalAveragePooling2D(),
        layers.Dropout(0.2),
    ]


#: By name, the layers between the inputs and the last `Dense`.
DRAWING = {"transformer": transformer, "cnn": augmented_cnn}
