"""Layers of the table of row proofs, in `keras.ops` and `keras.layers` only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
from keras import layers, ops


class Apply(layers.Layer):
    """A function of the inputs."""

    def __init__(self, function: Callable[..., Any]):
        super().__init__()
        self.function = function

    def call(self, *inputs: Any) -> Any:
        return self.function(*inputs)


class OwnModel(keras.Model):
    """A subclassed model of two layers of Keras's."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = layers.Dense(4), layers.Dense(1)
        self.inner.build((None, 4))
        self.head.build((None, 4))
        self.built = True

    def call(self, inputs: Any) -> Any:
        return self.head(self.inner(inputs))


class AddLoss(layers.Layer):
    """Returns its input and adds a function of it as a loss."""

    def __init__(self, function: Callable[[Any], Any]):
        super().__init__()
        self.function = function

    def call(self, inputs: Any) -> Any:
        self.add_loss(self.function(inputs))
        return inputs


class SelfAttention(layers.Layer):
    def __init__(self, **options: Any):
        super().__init__()
        self.supports_masking = True
        self.attention = layers.MultiHeadAttention(2, 4, **options)

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        return self.attention(inputs, inputs, use_causal_mask=True, training=training)


class ZeroTable(layers.Layer):
    """Adds a weight that is zero at first, with as many entries as the batch."""

    def __init__(self, rows: int):
        super().__init__()
        self.rows = rows

    def build(self, shape: Any) -> None:
        self.table = self.add_weight(shape=(self.rows, shape[-1]), initializer="zeros")

    def call(self, inputs: Any) -> Any:
        return inputs + self.table


class Tracked(layers.Layer):
    """Assigns a function of its state and its input to the state."""

    def __init__(self, function: Callable[[Any, Any], Any], shape: Any = ()):
        super().__init__()
        self.function = function
        self.state_shape = shape

    def build(self, shape: Any) -> None:
        self.state = self.add_weight(
            shape=self.state_shape, initializer="zeros", trainable=False
        )

    def call(self, inputs: Any) -> Any:
        self.state.assign(self.function(self.state, inputs))
        return inputs


class WeightLoss(layers.Layer):
    """Adds a loss of its weights only."""

    def build(self, shape: Any) -> None:
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones")

    def call(self, inputs: Any) -> Any:
        self.add_loss(ops.sum(ops.square(self.scale)))
        return inputs * self.scale


class Regularized(layers.Layer):
    """Adds the mean square of a batch-normalized product as a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.norm = layers.Dense(4), layers.BatchNormalization()

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        outputs = self.norm(self.dense(inputs), training=training)
        self.add_loss(ops.mean(ops.square(outputs)))
        return outputs


class Scaled(layers.Layer):
    """A function of its weight, of shape (columns,), and its input."""

    def __init__(self, function: Callable[[Any, Any], Any]):
        super().__init__()
        self.function = function

    def build(self, shape: Any) -> None:
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones")

    def call(self, inputs: Any) -> Any:
        return self.function(self.scale, inputs)


class Capacity(layers.Layer):
    """Two experts that accept the first rows, more than a small batch has."""

    def __init__(self, capacity: int):
        super().__init__()
        self.capacity = capacity

    def build(self, shape: Any) -> None:
        self.router = self.add_weight(shape=(shape[-1], 2))
        self.experts = self.add_weight(shape=(2, shape[-1], shape[-1]))

    def call(self, inputs: Any) -> Any:
        chances = ops.softmax(ops.matmul(inputs, self.router))
        chosen = ops.one_hot(ops.argmax(chances, axis=-1), 2)
        place = ops.cumsum(chosen, axis=0) * chosen
        kept = ops.where(place <= self.capacity, chosen, 0.0) * chances
        return ops.einsum("re,rd,edf->rf", kept, inputs, self.experts)


class Codebook(layers.Layer):
    """A vector quantizer with straight-through gradients, as in VQ-VAE."""

    def build(self, shape: Any) -> None:
        self.codes = self.add_weight(shape=(5, shape[-1]))

    def call(self, inputs: Any) -> Any:
        distances = ops.sum(
            ops.square(ops.expand_dims(inputs, 1) - ops.expand_dims(self.codes, 0)), -1
        )
        chosen = ops.take(self.codes, ops.argmin(distances, axis=-1), axis=0)
        self.add_loss(ops.mean(ops.square(ops.stop_gradient(chosen) - inputs)))
        self.add_loss(0.25 * ops.mean(ops.square(chosen - ops.stop_gradient(inputs))))
        return inputs + ops.stop_gradient(chosen - inputs)


class Sampled(layers.Layer):
    """The sampling of a variational autoencoder."""

    def __init__(self, shape_of: Callable[[Any], Any]):
        super().__init__()
        self.seed_generator = keras.random.SeedGenerator(5)
        self.shape_of = shape_of

    def call(self, inputs: Any) -> Any:
        noise = keras.random.normal(self.shape_of(inputs), seed=self.seed_generator)
        return inputs + noise


def with_gradient(gradient: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The identity, with a function of the output's gradient as its gradient."""

    def function(inputs: Any) -> Any:
        @ops.custom_gradient
        def identity(x: Any) -> Any:
            def grad(*args: Any, upstream: Any = None) -> Any:
                return gradient(args[0] if upstream is None else upstream)

            return x * 1.0, grad

        # On TensorFlow a variable itself would need another signature.
        return identity(inputs * 1.0)

    return function


def transformer(blocks: int = 1, width: int = 16, length: int = 5, rate: float = 0.0):
    inputs = keras.Input((length,), dtype="int32")
    x = layers.Embedding(50, width)(inputs)
    for _ in range(blocks):
        y = layers.LayerNormalization()(x)
        attention = layers.MultiHeadAttention(2, width // 2, dropout=rate)
        x = x + attention(y, y, use_causal_mask=True)
        y = layers.LayerNormalization()(x)
        y = layers.Dense(4 * width, "gelu")(y)
        x = x + layers.Dropout(rate)(layers.Dense(width)(y))
    return keras.Model(inputs, layers.Dense(50)(x))


def masked(inner: Callable[[], layers.Layer]) -> keras.Model:
    """A layer behind an embedding with a mask."""
    inputs = keras.Input((5,), dtype="int32")
    x = layers.Embedding(9, 8, mask_zero=True)(inputs)
    return keras.Model(inputs, inner()(x))
