"""A loss class that divides by the batch size gets 1/x on x replicas.

The loss sums over its rows and divides by the size of the global batch, as the guide
says for loops. Under `fit` each replica's share was taken for a mean, and averaged.

Framework: tf.distribute
Reported: keras 2, 2022-03
Link: https://github.com/keras-team/keras/issues/16285
Number: the loss that an epoch reports
"""

import keras
import numpy as np
import tensorflow as tf

from museum.common import exhibit_scopes, linear

X = np.array([[1.0], [2.0], [3.0], [4.0]], "float32")
Y = np.array([[2.0], [0.0], [1.0], [9.0]], "float32")


class SquaredError(keras.losses.Loss):
    def call(self, y_true, y_pred):
        return tf.reduce_sum((y_true - y_pred) ** 2) / len(X)


def train(scope):
    with scope:
        model = linear(loss=SquaredError())
    return model.fit(X, Y, batch_size=4, verbose=0).history["loss"][0]


exhibit_scopes(__doc__, train)
