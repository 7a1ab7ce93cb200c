"""Each device keeps moving statistics of its own, and those of one are saved.

Without `axis_name`, batch normalization under `pmap` sees the rows of a device. Weights
are kept in step by their gradients; statistics by nothing, and device 0's are saved.

Framework: Flax
Re-enacted: in jax, `pmap` over two devices
Reported: flax, 2021-01 (documented since)
Link: https://github.com/google/flax/issues/877
Number: the moving mean after a batch of four rows
"""

import jax
import numpy as np

import keras_strategies as ks
from museum.common import exhibit, our_batch_norm

ks.set_virtual_cpu_devices(2)
X = np.array([[1.0], [2.0], [10.0], [20.0]], "float32")


def moving_mean(rows):
    return 0.9 * 0.0 + 0.1 * rows.mean()


exhibit(
    __doc__,
    lambda: jax.pmap(moving_mean)(X.reshape(2, 2, 1))[0],
    lambda: moving_mean(X),
    lambda: our_batch_norm(X)[0],
)
