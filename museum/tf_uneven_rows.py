"""Replicas with unequal numbers of rows weigh the same.

Seven rows in batches of four: of the last batch one replica has two rows, the other
one. Each takes the mean of its rows, and the means weigh the same. (A first batch that
does not divide is an error.)

Framework: tf.distribute
Reported: Keras 3, 2024-06; mended by keras#20609 where replicas have equal rows
Link: https://github.com/keras-team/keras/issues/19891
Number: the weight after an epoch of two batches
Upstream: Losses are divided by the number of replicas and not by their share of the
  rows, so a batch that does not divide has another gradient than on one device.
"""

import numpy as np

from museum.common import exhibit_scopes, linear

X = np.array([[0.1], [0.2], [0.3], [0.4], [1.0], [2.0], [3.0]], "float32")
Y = np.array([[2.0], [0.0], [1.0], [9.0], [8.0], [1.0], [2.0]], "float32")


def train(scope):
    with scope:
        model = linear(loss="mse")
    model.fit(X, Y, batch_size=4, shuffle=False, verbose=0)
    return model.get_weights()[0]


exhibit_scopes(__doc__, train)
