"""TensorFlow: batches of which some replicas have no rows."""

from __future__ import annotations

import keras
import pytest
from keras import layers, ops

import keras_strategies as ks

if keras.backend.backend() != "tensorflow":
    pytest.skip("tests of the TensorFlow backend", allow_module_level=True)

import tensorflow as tf
from backends.tensorflow.tensorflow_training import (
    STRATEGIES,
    assert_same,
    random_values,
    two,
)

ks.set_virtual_cpu_devices(4)


class FirstRows(keras.Model):
    """Trains on the first rows of a batch, as many as the batch says.

    The number is not known when the step is traced: one program is for all.
    """

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def call(self, x, training=False):
        return self.inner(x, training=training)

    def train_step(self, data):
        x, y, count = data
        some = tf.range(count[0])
        return super().train_step((tf.gather(x, some), tf.gather(y, some)))


class MeanPenalty(layers.Layer):
    """Adds a loss that is no number where there are no rows."""

    def call(self, x):
        self.add_loss(ops.mean(ops.square(x)))
        return x


def image_layers():
    return [
        keras.Input((6, 6, 2)),
        layers.Dense(4, activation="relu"),
        layers.BatchNormalization(),
        layers.AveragePooling2D(2),
        layers.Flatten(),
        MeanPenalty(),
        layers.Dense(3, activity_regularizer="l2"),
    ]


def sentence_layers():
    return [
        keras.Input((5,), dtype="int32"),
        layers.Embedding(10, 4, mask_zero=True),
        layers.BatchNormalization(),
        layers.LSTM(4),
        layers.Dense(3),
    ]


def attention_layers():
    x = keras.Input((5, 4))
    y = layers.MultiHeadAttention(2, 2)(x, x)
    y = layers.LayerNormalization()(y + x)
    y = layers.GroupNormalization(2)(y)
    y = layers.Dense(4, activation="relu")(y)
    return keras.Model(x, layers.Dense(3)(layers.GlobalAveragePooling1D()(y)))


def batches_of_some(x, y, counts):
    """A batch of all rows for each count, with the count beside each row."""
    data = tf.data.Dataset.from_tensor_slices(counts)
    return data.map(lambda count: (x, y, tf.repeat(count, len(x))))


def maximum_layers():
    return keras.Sequential([layers.GlobalMaxPooling2D(), layers.Dense(3)])


# Two replicas run what four run, and take half as long to trace; with four, several
# have no rows.
ODD_LAYERS = {
    "images": (lambda: keras.Sequential(image_layers()), ((9, 6, 6, 2), "float"), 4),
    "sentences": (lambda: keras.Sequential(sentence_layers()), ((9, 5), "int"), 2),
    "attention": (attention_layers, ((9, 5, 4), "float"), 2),
    "maximum": (maximum_layers, ((9, 6, 6, 2), "float"), 2),
}


@pytest.mark.nightly(unless=["maximum"])
@pytest.mark.parametrize("kind", ODD_LAYERS)
def test_replicas_without_rows_add_nothing(kind):
    make_inner, shape, replicas = ODD_LAYERS[kind]
    x, y = random_values(*shape), random_values((9, 3), "float")

    def make():
        model = FirstRows(make_inner())
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    def train(model):
        losses = []
        note = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: losses.append(logs["loss"])
        )
        model.fit(batches_of_some(x, y, [1, 3, 6]), callbacks=[note], verbose=0)
        return losses

    assert_same(STRATEGIES[f"mirrored_{replicas}"](), make, train, 2e-5)


class Pooling(layers.Layer):
    """A layer of a user, whose name says nothing."""

    def call(self, x):
        return ops.max_pool(x, 2)


class Filter(layers.Layer):
    def build(self, shape):
        self.kernel = self.add_weight(shape=(3, 3, 2, 3))

    def call(self, x):
        return ops.conv(x, self.kernel, padding="same")


def with_operations():
    x = keras.Input((6, 6, 2))
    return keras.Model(x, ops.max_pool(ops.relu(x), 2))


@pytest.mark.nightly(unless=["max_pooling2d"])
@pytest.mark.parametrize(
    "layer",
    [
        layers.Conv2D(3, 3, padding="same"),
        layers.MaxPooling2D(),
        Pooling(),
        Filter(),
        with_operations(),
        keras.Sequential([layers.TimeDistributed(layers.Conv1D(2, 2))]),
    ],
    ids=lambda layer: layer.name,
)
def test_kernels_that_fail_on_no_rows_are_not_given_any(layer):
    x, y = random_values((9, 6, 6, 2), "float"), random_values((9, 3), "float")
    inner = [keras.Input((6, 6, 2)), layer, layers.Flatten(), layers.Dense(3)]
    with two().scope():
        model = FirstRows(keras.Sequential(inner))
        model.compile("sgd", "mse")
    model.fit(batches_of_some(x, y, [2]), verbose=0)
    with pytest.raises(tf.errors.InvalidArgumentError, match="fewer rows than the 2"):
        model.fit(batches_of_some(x, y, [1]), verbose=0)
