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

from museum.common import exhibit_devices, our_batch_norm

X = np.array([[1.0], [2.0], [10.0], [20.0]], "float32")


def moving_mean(rows):
    return 0.9 * 0.0 + 0.1 * rows.mean()


def step(devices):
    return jax.pmap(moving_mean, devices=devices)(X.reshape(len(devices), -1, 1))


exhibit_devices(__doc__, step, lambda: our_batch_norm(X)[0])
