"""A loop reports the mean of the replicas' shares of a loss.

The loss of a replica is the sum over its rows divided by the global batch: a share. The
guide reduced the shares by MEAN; their sum is the loss.

Framework: tf.distribute
Re-enacted: in tf.distribute, the loop of the guide, which was mended
Reported: tensorflow's guide, 2019-05
Link: https://github.com/tensorflow/tensorflow/issues/28956
Number: the loss of four rows
"""

import numpy as np
import tensorflow as tf

import keras_strategies as ks
from museum.common import exhibit_devices, two_replicas

X = np.array([[1.0], [2.0], [3.0], [4.0]], "float32")


def share(x):
    return tf.nn.compute_average_loss(tf.reduce_sum(x**2, 1), global_batch_size=4)


def step(devices):
    strategy = tf.distribute.MirroredStrategy(devices)
    rows = tf.data.Dataset.from_tensor_slices(X).batch(4)
    (x,) = strategy.experimental_distribute_dataset(rows)
    return strategy.reduce("MEAN", strategy.run(share, args=(x,)), axis=None)


def ours():
    strategy = two_replicas()
    (x,) = strategy.experimental_distribute_dataset(X, batch_size=4)
    losses = strategy.run(lambda x: ks.compute_average_loss(x[:, 0] ** 2), args=(x,))
    return strategy.reduce("SUM", losses)


exhibit_devices(__doc__, step, ours)
