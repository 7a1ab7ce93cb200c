"""A loop applies the sum of the replicas' mean gradients.

The sum of gradients of `tf.reduce_mean` is too large by the number of replicas.

Framework: tf.distribute
Reported: tensorflow, 2021-05 (the guide warns of it)
Link: https://github.com/tensorflow/tensorflow/issues/48875
Number: by how much a step of SGD changes the weight
Upstream: `apply` in `run` could warn of a loss that no division has scaled.
"""

import tensorflow as tf

import keras_strategies as ks
from museum.common import exhibit_devices, linear, two_replicas

X = [[1.0], [0.5], [0.2], [0.1]]


def change(strategy, mean=tf.reduce_mean):
    with strategy.scope():
        model = linear(loss="mse")
    model.optimizer.build(model.trainable_variables)

    def step(x):
        with tf.GradientTape() as tape:
            loss = mean((model(x)[:, 0] - 2.0) ** 2)
        model.optimizer.apply(tape.gradient(loss, model.trainable_variables))

    (x,) = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensors(X))
    tf.function(strategy.run)(step, args=(x,))
    return model.get_weights()[0] - 1


exhibit_devices(
    __doc__,
    lambda devices: change(tf.distribute.MirroredStrategy(devices)),
    lambda: change(two_replicas(), ks.compute_average_loss),
)
