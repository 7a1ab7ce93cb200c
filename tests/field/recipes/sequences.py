"""Text, speech and time series: recurrent networks, attention, masks."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from harness.data import Data
from harness.training import ADAM_TOLERANCE
from keras import layers, ops

from field.compare import FieldCase
from field.recipes.common import crossentropy, digits, losses_of, ready, sgd, stack
from field.steps import StepModel

VOCABULARY, LENGTH = 20, 6


def words(rows: int, seed: int = 0) -> np.ndarray:
    """Token ids (rows, LENGTH), padded with zeros; the mask token is 1."""
    random = np.random.default_rng(seed)
    ids = random.integers(2, VOCABULARY, (rows, LENGTH))
    lengths = random.integers(2, LENGTH + 1, rows)
    return (ids * (np.arange(LENGTH) < lengths[:, None])).astype("int32")


def translations(rows: int) -> Data:
    target = words(rows, 2)
    return Data({"source": words(rows, 1), "target": target}, np.roll(target, -1, 1))


def seq2seq() -> keras.Model:
    """GRUs with attention; padding's masks go through all layers to the loss."""
    source = keras.Input((LENGTH,), dtype="int32", name="source")
    target = keras.Input((LENGTH,), dtype="int32", name="target")
    table = layers.Embedding(VOCABULARY, 8, mask_zero=True)
    encoded, state = layers.GRU(8, return_sequences=True, return_state=True)(
        table(source)
    )
    decoded = layers.GRU(8, return_sequences=True)(table(target), initial_state=state)
    seen = layers.Attention()([decoded, encoded])
    both = layers.Concatenate()([decoded, seen])
    model = keras.Model({"source": source, "target": target}, layers.Dense(20)(both))
    return ready(model, sgd(0.2), crossentropy(), metrics=["accuracy"])


class Block(layers.Layer):
    """Attention and a feed-forward part with residual connections."""

    def __init__(self, width: int, causal: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.supports_masking = True
        self.causal = causal
        self.attention = layers.MultiHeadAttention(2, width // 2, use_bias=False)
        self.mlp = keras.Sequential(
            [layers.Dense(2 * width, "gelu"), layers.Dense(width)]
        )
        self.first, self.second = (layers.LayerNormalization() for _ in range(2))

    def call(self, x: Any, training: bool = False) -> Any:
        seen = self.attention(x, x, use_causal_mask=self.causal, training=training)
        x = self.first(x + seen)
        return self.second(x + self.mlp(x))


class Positions(layers.Layer):
    """Adds a vector to each position."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.supports_masking = True

    def build(self, shape: Any) -> None:
        self.table = self.add_weight(shape=shape[1:], initializer="random_normal")

    def call(self, x: Any) -> Any:
        return x + self.table


def masked_words(rows: int) -> Data:
    ids = words(rows)
    random = np.random.default_rng(4)
    hidden = (random.random(ids.shape) < 0.4) & (ids > 0)
    return Data(np.where(hidden, 1, ids), ids, hidden.astype("float32"))


class MaskedLM(StepModel):
    """Words that are hidden; each has a weight, the others none."""

    def __init__(self, net: keras.Model) -> None:
        super().__init__()
        self.net = net
        self.tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self) -> list[Any]:
        return [self.tracker]

    def step(self, data: Any) -> dict[str, Any]:
        x, y, weight = data

        def loss() -> Any:
            losses = losses_of(y, self.net(x, training=True))
            return ops.sum(losses * weight) / ops.sum(weight)

        found = self.minimize(loss, self.trainable_variables)
        self.tracker.update_state(found, sample_weight=ops.sum(weight))
        return {"loss": self.tracker.result()}


def transformer(causal: bool = False) -> keras.Model:
    ids = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(VOCABULARY, 8)(ids)
    x = Block(8, causal)(Positions()(x))
    return keras.Model(ids, layers.Dense(VOCABULARY)(x))


def miniature_gpt() -> keras.Model:
    adam = keras.optimizers.Adam(1e-2, epsilon=1e-4)
    return ready(transformer(causal=True), adam, crossentropy())


def next_words(rows: int) -> Data:
    ids = words(rows, 6)
    return Data(ids, np.roll(ids, -1, axis=1))


def series(rows: int) -> Data:
    start = np.random.default_rng(5).uniform(0, 6, (rows, 1))
    values = np.sin(start + np.arange(9) / 2).astype("float32")
    return Data(values[:, :8, None], values[:, 8:])


def forecast() -> keras.Model:
    """A transformer of a time series."""
    values = keras.Input((8, 1))
    x = Positions()(layers.Dense(8)(values))
    x = layers.GlobalAveragePooling1D()(Block(8)(x))
    return ready(keras.Model(values, layers.Dense(1)(x)), loss="mse", metrics=["mae"])


def quantiles() -> keras.Model:
    """Three quantiles, each with a pinball loss."""
    values = keras.Input((8, 1))
    x = layers.LSTM(8)(values)
    outputs = {name: layers.Dense(1, name=name)(x) for name in ("low", "mid", "high")}

    def pinball(share: float) -> Any:
        def loss(y_true: Any, y_pred: Any) -> Any:
            error = y_true - y_pred
            return ops.mean(ops.maximum(share * error, (share - 1) * error), axis=-1)

        return loss

    losses = {"low": pinball(0.1), "mid": pinball(0.5), "high": pinball(0.9)}
    return ready(keras.Model(values, outputs), loss=losses)


def three_targets(rows: int) -> Data:
    data = series(rows)
    return Data(data.x, dict.fromkeys(("low", "mid", "high"), data.y))


def stateful_rnn() -> keras.Model:
    """States that go on from batch to batch, so batches are of one size."""
    inputs = keras.Input(batch_shape=(4, 8, 1))
    parts = [inputs, layers.LSTM(6, stateful=True), layers.Dense(1)]
    return ready(keras.Sequential(parts), loss="mse")


def spoken(rows: int) -> Data:
    """Rows of a digit's image as frames, and a word of two letters."""
    random = np.random.default_rng(6)
    letters = random.integers(1, 5, (rows, 2)).astype("int32")
    return Data(digits(rows).x[..., 0], letters)


def ctc() -> keras.Model:
    speech = layers.Bidirectional(layers.GRU(6, return_sequences=True))
    model = stack((8, 8), speech, layers.Dense(5))
    return ready(model, sgd(0.02), keras.losses.CTC())


def bidirectional() -> keras.Model:
    """A text's class by two LSTMs, one in each direction."""
    model = stack(
        (LENGTH,),
        layers.Embedding(VOCABULARY, 8, mask_zero=True),
        layers.Bidirectional(layers.LSTM(6)),
        layers.Dense(1),
        dtype="int32",
    )
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    return ready(model, sgd(0.2), loss, metrics=["accuracy"])


def judged(rows: int) -> Data:
    ids = words(rows, 7)
    return Data(ids, (ids.sum(1, keepdims=True) % 2).astype("float32"))


CASES = [
    FieldCase("seq2seq_attention", seq2seq, translations),
    FieldCase("masked_lm", lambda: ready(MaskedLM(transformer())), masked_words),
    FieldCase("miniature_gpt", miniature_gpt, next_words, tolerance=ADAM_TOLERANCE),
    FieldCase("bidirectional_lstm", bidirectional, judged),
    FieldCase("forecast_transformer", forecast, series),
    FieldCase("quantiles", quantiles, three_targets),
    FieldCase(
        "stateful_rnn",
        stateful_rnn,
        series,
        rows=12,
        # Keras 3.15 assigns the states in place before the backward pass.
        refused_by={"torch": RuntimeError},
    ),
    FieldCase("ctc", ctc, spoken),
]
