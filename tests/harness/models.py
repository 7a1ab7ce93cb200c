"""Tiny models of every kind. Each function makes a new one."""

from __future__ import annotations

import keras
from keras import layers, ops


def _stack(*hidden, inputs=(6,), dtype=None) -> keras.Model:
    return keras.Sequential([keras.Input(inputs, dtype=dtype), *hidden])


def _of_words(*hidden) -> keras.Model:
    """A class from what layers make of embedded words."""
    embedding = layers.Embedding(11, 4, mask_zero=True)
    parts = [each() for each in hidden]
    return _stack(
        embedding, *parts, layers.Dense(3, "softmax"), inputs=(5,), dtype="int32"
    )


def _norm() -> keras.layers.Layer:
    return layers.BatchNormalization(momentum=0.8)


def dense() -> keras.Model:
    return _stack(layers.Dense(8, "tanh"), layers.Dense(3, "softmax"))


def unbuilt() -> keras.Model:
    """A sequential model that gets its variables from the first batch."""
    return keras.Sequential([layers.Dense(8, "tanh"), layers.Dense(3, "softmax")])


def linear() -> keras.Model:
    return _stack(layers.Dense(8, "tanh"), layers.Dense(2))


def logistic() -> keras.Model:
    return _stack(layers.Dense(8, "tanh"), layers.Dense(1, "sigmoid"))


def conv() -> keras.Model:
    return _stack(
        layers.Conv2D(4, 3, strides=2, use_bias=False),
        _norm(),
        layers.ReLU(),
        layers.GlobalAveragePooling2D(),
        layers.Dense(3, activation="softmax"),
        inputs=(8, 8, 2),
    )


def dense_bn() -> keras.Model:
    return _stack(
        layers.Dense(8, use_bias=False),
        _norm(),
        layers.ReLU(),
        layers.Dense(3, "softmax"),
    )


def _heads(hidden, **heads):
    """A dense layer for each name, from the arguments for it."""
    return {k: layers.Dense(*given, name=k)(hidden) for k, given in heads.items()}


def two_towers() -> keras.Model:
    """Two named inputs, two named outputs."""
    left, right = keras.Input((4,), name="left"), keras.Input((3,), name="right")
    joined = layers.Concatenate()([layers.Dense(5, "tanh")(left), right])
    outputs = _heads(joined, kind=(3, "softmax"), size=(1,))
    return keras.Model({"left": left, "right": right}, outputs)


def pair() -> keras.Model:
    left, right = keras.Input((4,)), keras.Input((3,))
    joined = layers.Concatenate()([layers.Dense(5, "tanh")(left), right])
    return keras.Model((left, right), layers.Dense(1)(joined))


def _nested():
    a, b, c = keras.Input((4,)), keras.Input((3,)), keras.Input((2,))
    hidden = layers.Dense(5, "tanh")(layers.Concatenate()([a, b, c]))
    return {"a": {"deep": a}, "b": [b, c]}, hidden


def nested() -> keras.Model:
    inputs, hidden = _nested()
    return keras.Model(inputs, layers.Dense(1)(hidden))


def structured() -> keras.Model:
    """Nested inputs, named outputs."""
    inputs, hidden = _nested()
    return keras.Model(inputs, _heads(hidden, kind=(3, "softmax"), size=(1,)))


def many_outputs() -> keras.Model:
    """An output for each of several losses."""
    inputs = keras.Input((6,))
    heads = {**dict.fromkeys("abcdefg", (2,)), "smoothed": (3, "softmax")}
    hidden = layers.Dense(8, "tanh")(inputs)
    return keras.Model(inputs, _heads(hidden, **heads, focal=(1, "sigmoid")))


def pair_of_outputs() -> keras.Model:
    """A tuple of inputs, two named outputs."""
    left, right = keras.Input((4,)), keras.Input((3,))
    joined = layers.Concatenate()([layers.Dense(5, "tanh")(left), right])
    return keras.Model((left, right), _heads(joined, scalar=(2,), contrastive=(2,)))


def three_outputs() -> keras.Model:
    """An output for each kind of metrics."""
    inputs = keras.Input((6,))
    heads = {"binary": (1, "sigmoid"), "numbers": (2,), "classes": (3, "softmax")}
    return keras.Model(inputs, _heads(layers.Dense(8, "tanh")(inputs), **heads))


def shared_layer() -> keras.Model:
    """One layer that is called twice."""
    inputs = keras.Input((6,))
    twice = layers.Dense(6, "tanh")
    return keras.Model(inputs, layers.Dense(3, "softmax")(twice(twice(inputs))))


@keras.saving.register_keras_serializable("tests")
class Subclassed(keras.Model):
    """A model with a call of its own and another model inside."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.first = layers.Dense(8, activation="tanh")
        # A bias before batch normalization has no gradient but rounding errors.
        inner = layers.Dense(8, use_bias=False)
        self.inner = keras.Sequential([inner, layers.BatchNormalization()])
        self.last = layers.Dense(3, activation="softmax")

    def call(self, inputs, training=False):
        hidden = self.first(inputs)
        return self.last(hidden + self.inner(hidden, training=training))


def lstm() -> keras.Model:
    return _of_words(lambda: layers.LSTM(5))


def gru_tagger() -> keras.Model:
    """A class for each word; the padding's mask reaches the loss."""
    return _of_words(lambda: layers.GRU(5, return_sequences=True))


def masked_bn() -> keras.Model:
    """Batch normalization that leaves out the padding."""
    return _of_words(_norm, lambda: layers.LSTM(5))


def masked_tagger() -> keras.Model:
    """The padding's mask reaches batch normalization, a recurrent layer, the loss."""
    return _of_words(_norm, lambda: layers.LSTM(5, return_sequences=True))


def transformer() -> keras.Model:
    words = keras.Input((5,), dtype="int32")
    x = layers.Embedding(11, 8, mask_zero=True)(words)
    x = layers.LayerNormalization()(
        x + layers.MultiHeadAttention(2, 4, use_bias=False)(x, x)
    )
    x = layers.LayerNormalization()(x + layers.Dense(8, "gelu")(x))
    x = layers.GlobalAveragePooling1D()(x)
    return keras.Model(words, layers.Dense(3, "softmax")(x))


def regularized() -> keras.Model:
    return _stack(
        layers.Dense(8, "tanh", kernel_regularizer="l2", bias_regularizer="l1"),
        layers.Dense(3, "softmax", kernel_regularizer=keras.regularizers.L1(0.02)),
    )


def spectral() -> keras.Model:
    """Layers that assign trained variables in their call."""
    return _stack(*_spectral_layers(), layers.Softmax())


def _spectral_layers():
    options = {"kernel_regularizer": "l2", "kernel_constraint": "max_norm"}
    yield layers.SpectralNormalization(layers.Dense(8, "tanh", **options))
    last = layers.Dense(3, kernel_regularizer="l1", bias_constraint="non_neg")
    yield layers.SpectralNormalization(last, power_iterations=2)


def tied() -> keras.Model:
    """An embedding with its transpose as the last kernel, as in language models."""
    words = keras.Input((5,), dtype="int32")
    embedding = layers.ReversibleEmbedding(11, 4)
    hidden = layers.Dense(4, "tanh")(embedding(words))
    return keras.Model(words, layers.Softmax()(embedding(hidden, reverse=True)))


@keras.saving.register_keras_serializable("tests")
class PositionEmbedding(layers.Layer):
    """Returns its variable for each row, whatever the values of the input are."""

    def build(self, shape):
        self.table = self.add_weight(shape=shape[1:], name="table")

    def call(self, inputs):
        return ops.broadcast_to(self.table, ops.shape(inputs))


def with_positions() -> keras.Model:
    words = keras.Input((5,), dtype="int32")
    embedded = layers.Embedding(11, 4)(words)
    added = layers.Add()([embedded, PositionEmbedding()(embedded)])
    outputs = layers.Dense(3, "softmax")(layers.Dense(4, "tanh")(added))
    return keras.Model(words, outputs)


def tied_transformer() -> keras.Model:
    """A mask in attention, positions, an embedding that is also the last kernel."""
    words = keras.Input((5,), dtype="int32")
    embedding = layers.ReversibleEmbedding(11, 8, mask_zero=True)
    x = embedding(words)
    attention = layers.MultiHeadAttention(2, 4, use_bias=False)
    x = layers.LayerNormalization()(x + attention(x, x))
    x = x + PositionEmbedding()(x)
    x = layers.LayerNormalization()(x + layers.Dense(8, "gelu")(x))
    return keras.Model(words, layers.Softmax()(embedding(x, reverse=True)))


def frozen() -> keras.Model:
    """Nothing to train."""
    model = dense()
    model.trainable = False
    return model


def quantized() -> keras.Model:
    """Frozen int8 kernels; only the last layer is trained."""
    inner = _stack(layers.Dense(8, "tanh"))
    inner.quantize("int8")
    return _stack(inner, layers.Dense(3, "softmax"))


def activity_regularized() -> keras.Model:
    """Keras divides an activity regularizer's sum by the rows of its batch."""
    return _stack(
        layers.Dense(8, "tanh", activity_regularizer=keras.regularizers.L2(0.1)),
        layers.ActivityRegularization(l1=0.05),
        layers.Dense(3, activation="softmax"),
    )


@keras.saving.register_keras_serializable("tests")
class AddsLoss(layers.Layer):
    """Adds the mean or the sum of its squared input to the model's losses."""

    def __init__(self, reduction, **kwargs):
        super().__init__(**kwargs)
        self.reduction = reduction

    def call(self, inputs):
        squares = 0.05 * ops.square(inputs)
        self.add_loss(getattr(ops, self.reduction)(squares))
        return inputs

    def get_config(self):
        return {**super().get_config(), "reduction": self.reduction}


def adds_loss(reduction: str) -> keras.Model:
    return _stack(
        layers.Dense(8, "tanh"), AddsLoss(reduction), layers.Dense(3, "softmax")
    )


def adds_two_losses() -> keras.Model:
    """A mean, a sum and a weight penalty in one model."""
    inputs = keras.Input((6,))
    x = layers.Dense(8, "tanh", kernel_regularizer="l2")(inputs)
    x = AddsLoss("sum")(AddsLoss("mean")(x))
    return keras.Model(inputs, layers.Dense(3, "softmax")(x))


def penalized() -> keras.Model:
    """Everything that adds to a loss: of weights, of activations, of a layer's own."""
    inputs = keras.Input((6,))
    x = layers.Dense(8, "tanh", kernel_regularizer="l2", bias_regularizer="l1")(inputs)
    x = AddsLoss("sum")(AddsLoss("mean")(x))
    activity = keras.regularizers.L2(0.1)
    x = layers.Dense(6, "tanh", activity_regularizer=activity)(x)
    x = layers.ActivityRegularization(l1=0.05)(x)
    last = layers.Dense(3, "softmax", kernel_regularizer=keras.regularizers.L1(0.02))
    return keras.Model(inputs, last(x))


def dropout() -> keras.Model:
    return _stack(
        layers.Dense(16, "relu"), layers.Dropout(0.5), layers.Dense(3, "softmax")
    )


@keras.saving.register_keras_serializable("tests")
class CountsCalls(layers.Layer):
    """Keeps an integer count of calls and a moving average of the input's mean."""

    def build(self, _):
        options = {"shape": (), "initializer": "zeros", "trainable": False}
        self.calls = self.add_weight(dtype="int32", name="calls", **options)
        self.average = self.add_weight(name="average", **options)

    def call(self, inputs, training=False):
        if training:
            self.calls.assign(self.calls + 1)
            mean = ops.mean(inputs)
            self.average.assign(self.average * 0.5 + 0.5 * ops.cast(mean, "float32"))
        return inputs


def counting() -> keras.Model:
    """A layer with non-trainable state that is no batch normalization."""
    return _stack(CountsCalls(), layers.Dense(3, "softmax"))


def stateful_layers() -> keras.Model:
    """State of a layer's own, a layer that is called twice, variables set in a call."""
    inputs = keras.Input((6,))
    twice = layers.Dense(6, "tanh")
    x = twice(twice(CountsCalls()(inputs)))
    for layer in _spectral_layers():
        x = layer(x)
    return keras.Model(inputs, layers.Softmax()(x))
