"""`clipnorm` clips the gradient of each replica, before they are summed.

Replicas with gradients that point apart are cut to the norm by themselves, and what is
applied is neither the gradient of the batch nor that gradient, clipped.

Framework: tf.distribute
Reported: tensorflow 2.0, then switched off; lczero-training#162, 2021-07
Link: https://github.com/tensorflow/tensorflow/issues/33929
Number: the weight after a step of SGD
Upstream: In Keras 3 `Optimizer.apply` clips in the replica context, before the
  gradients are reduced. Please clip what the reduction gives, as on one device.
"""

import keras
import numpy as np

from museum.common import exhibit_scopes, linear

X = np.array([[1.0], [2.0], [3.0], [4.0]], "float32")
Y = np.array([[2.0], [0.0], [1.0], [3.0]], "float32")


def train(scope):
    with scope:
        model = linear()
        model.compile(keras.optimizers.SGD(0.1, clipnorm=1.0), "mse")
    model.fit(X, Y, batch_size=4, shuffle=False, verbose=0)
    return model.get_weights()[0]


exhibit_scopes(__doc__, train)
