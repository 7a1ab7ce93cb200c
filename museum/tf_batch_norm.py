"""Batch normalization has the statistics of a replica.

`BatchNormalization` normalizes the rows of its replica, and the moving variance is the
mean of variances within replicas: what lies between replicas is in none.

Framework: tf.distribute
Reported: tensorflow 1
Link: https://github.com/tensorflow/tensorflow/issues/18222
Number: the moving variance after a batch of four rows
Upstream: `synchronized=True` exists and is off by default. A line in the documentation
  of MirroredStrategy should say that training depends on the rows of a replica.
"""

import keras
import numpy as np

from museum.common import exhibit_scopes

X = np.array([[1.0], [2.0], [10.0], [20.0]], "float32")


def train(scope):
    with scope:
        layer = keras.layers.BatchNormalization(momentum=0.9)
        model = keras.Sequential([keras.Input((1,)), layer])
        model.compile("sgd", "mse")
    model.fit(X, X, batch_size=4, shuffle=False, verbose=0)
    return keras.ops.convert_to_numpy(layer.moving_variance)


exhibit_scopes(__doc__, train)
