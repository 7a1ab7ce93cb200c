"""`fit` reports what the first replica returns from `train_step`.

A custom `train_step` returns a loss. Of the replicas' losses the progress bar, the
history and every callback get the first one; no row of the others is in it.

Framework: tf.distribute
Reported: tensorflow 2.5, 2021-10
Link: https://github.com/keras-team/keras/issues/15509
Number: the loss that a step reports
"""

import keras
import numpy as np
import tensorflow as tf

from museum.common import exhibit_scopes

X = np.array([[1.0], [2.0], [3.0], [4.0]], "float32")
Y = np.array([[2.0], [0.0], [1.0], [9.0]], "float32")


class Model(keras.Sequential):
    def train_step(self, data):
        x, y = data
        return {"own_loss": tf.reduce_mean((self(x, training=True) - y) ** 2)}


def train(scope):
    with scope:
        model = Model([keras.Input((1,)), keras.layers.ReLU()])
        model.compile("sgd")
    return model.fit(X, Y, batch_size=4, verbose=0).history["own_loss"][0]


exhibit_scopes(__doc__, train)
