"""TensorFlow: replicas without rows run any layer, and add nothing."""

from __future__ import annotations

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import keras_strategies as ks

SEQUENCE, IMAGE, VOLUME = (6, 3), (6, 6, 3), (4, 4, 4, 3)


def network():
    first = [layers.Conv2D(4, 3), layers.BatchNormalization(), layers.MaxPooling2D(2)]
    return keras.Sequential([*first, layers.Flatten(), layers.Dense(2)])


LAYERS = {
    "conv3d": (lambda: layers.Conv3D(4, 3), VOLUME),
    "conv1d_transpose": (lambda: layers.Conv1DTranspose(4, 3), SEQUENCE),
    "max2d": (lambda: layers.MaxPooling2D(2), IMAGE),
    "average2d": (lambda: layers.AveragePooling2D(2), IMAGE),
    "own_kernels": (lambda: Kernels(), IMAGE),
    "network": (network, IMAGE),
}


class Kernels(layers.Layer):
    """A layer of a user that calls the kernels, and has a state and a row count."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(3, 3, 3, 4))
        self.narrow = self.add_weight(shape=(2, 2, 2, 4))
        self.rows = self.add_weight(shape=(), trainable=False, aggregation="sum")

    def call(self, x):
        self.rows.assign_add(ops.cast(ops.shape(x)[0], "float32"))
        y = ops.relu(ops.conv(x, self.kernel, padding="same") + 0.1)
        y = ops.conv_transpose(y, self.narrow, 2)
        y, _ = tf.nn.max_pool_with_argmax(ops.max_pool(y, 2), 2, 1, "SAME")
        return tf.nn.depthwise_conv2d(y, self.narrow[..., :1], [1] * 4, "SAME")


def train(strategy, make, x, compiled):
    """Outputs by replica, gradients and state after a step on the parts of `x`."""
    keras.utils.set_random_seed(0)
    with strategy.scope():
        layer = make()
        layer.build((None, *x[0].shape[1:]))
    has_training = "training" in layer._call_signature.parameters
    options = {"training": True} if has_training else {}

    def fn(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x, **options)
            loss = tf.reduce_sum(y**2)
        weights = [weight.value for weight in layer.trainable_weights]
        by_x, *gradients = tape.gradient(loss, [x, *weights])
        replica = ks.get_replica_context()
        summed = [replica.all_reduce("sum", gradient) for gradient in gradients]
        return y, by_x, summed

    def run(x):
        return strategy.run(fn, args=(x,))

    if compiled:
        spec = tf.TensorSpec((None, *x[0].shape[1:]), "float32")
        program = tf.function(lambda *parts: run(ks.PerReplica(parts)))
        outputs, by_x, summed = program.get_concrete_function(*[spec] * len(x))(*x)
    else:
        outputs, by_x, summed = run(x[0] if len(x) == 1 else ks.PerReplica(tuple(x)))
    local = strategy.experimental_local_results
    outputs, by_x = (list(map(np.asarray, local(each))) for each in (outputs, by_x))
    return outputs, by_x, [np.asarray(local(g)[0]) for g in summed], layer.get_weights()


def three_rows(name):
    values = np.random.default_rng(0).normal(size=(3, *LAYERS[name][1]))
    return tf.constant(values, "float32")


@functools.cache
def alone(name):
    one = ks.OneDeviceStrategy("cpu:0")
    return train(one, LAYERS[name][0], [three_rows(name)], compiled=False)


# Eager replicas reach the kernels of every layer. In a program for any number of rows a
# conditional adds the row, and gradients go through it; all else runs each night.
BY_DAY = ("conv3d-False", "max2d-False", "average2d-False", "network-True")


@pytest.mark.nightly(unless=BY_DAY)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_a_replica_without_rows_adds_nothing(name, compiled):
    make, x = LAYERS[name][0], three_rows(name)
    one = alone(name)
    two = ks.MirroredStrategy(["cpu:0", "cpu:1"])
    outputs, by_x, summed, weights = train(two, make, [x, x[:0]], compiled)
    np.testing.assert_allclose(outputs[0], one[0][0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(by_x[0], one[1][0], rtol=1e-4, atol=1e-4)
    assert outputs[1].shape == (0, *one[0][0].shape[1:])
    assert by_x[1].shape == (0, *x.shape[1:])
    for found, expected in zip(summed, one[2], strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    for found, expected in zip(weights, one[3], strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


class Penalized(layers.Layer):
    """Adds a loss that is not a number without rows, nor is its gradient."""

    def build(self, input_shape):
        self.scale = self.add_weight(shape=(), initializer="ones")

    def call(self, x):
        self.add_loss(self.scale * ops.mean(ops.square(x)))
        return x * self.scale


class FirstRows(keras.Sequential):
    """Trains on the first rows of a batch, as many as the batch says."""

    def train_step(self, data):
        x, y, count = data
        some = tf.range(count[0])
        return super().train_step((tf.gather(x, some), tf.gather(y, some)))


def batches(shape, counts):
    """A batch of nine rows for each count, with the count beside each row."""
    random = np.random.default_rng(1)
    x = random.normal(size=(9, *shape)).astype("float32")
    data = tf.data.Dataset.from_tensor_slices(counts)
    return data.map(lambda count: (x, x.reshape(9, -1)[:, :3], tf.repeat(count, 9)))


@pytest.mark.parametrize("inner", [layers.GlobalMaxPooling2D, Penalized])
def test_replicas_without_rows_add_nothing_in_fit(inner):
    def trained(strategy):
        losses = []
        keras.utils.set_random_seed(1)
        with strategy.scope():
            last = [layers.Flatten(), layers.Dense(3)]
            model = FirstRows([keras.Input(IMAGE), inner(), *last])
            model.compile(keras.optimizers.SGD(0.1), "mse")
        note = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: losses.append(logs["loss"])
        )
        model.fit(batches(IMAGE, [1, 3, 6]), callbacks=[note], verbose=0)
        return [np.array(losses), *model.get_weights()]

    four = ks.MirroredStrategy([f"cpu:{i}" for i in range(4)])
    expected = trained(ks.OneDeviceStrategy("cpu:0"))
    for one, other in zip(trained(four), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)


def test_kernels_that_fail_on_no_rows_are_not_given_any():
    two = ks.MirroredStrategy(["cpu:0", "cpu:1"])
    with two.scope():
        pooling = [layers.MaxPooling2D(), layers.Flatten(), layers.Dense(3)]
        model = FirstRows([keras.Input(IMAGE), *pooling])
        model.compile("sgd", "mse")
    model.fit(batches(IMAGE, [2]), verbose=0)
    with pytest.raises(tf.errors.InvalidArgumentError, match="fewer rows than the 2"):
        model.fit(batches(IMAGE, [1]), verbose=0)
