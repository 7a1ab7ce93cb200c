"""The gradient of a sum over devices is not the gradient of the sum.

`jax.grad` of a loss that ends in `psum`, inside of `pmap`: the loss is that of all
rows, the gradient of a device that of its own rows, times the number of devices.

Framework: JAX
Reported: jax, 2020-08; open
Link: https://github.com/jax-ml/jax/issues/3970
Published: gradients of 0 and 4 on two devices instead of 2
Number: the gradient on the first device
Upstream: `pmap` still transposes `psum` to `psum`, where `shard_map` has types.
"""

import jax
import numpy as np

from museum.common import exhibit_devices, our_weight

DATA = np.array([1.0, 0.0], "float32")


def gradients(w, data):
    return jax.grad(lambda w: jax.lax.psum((w**2 + 1) * data.sum(), "rows"))(w)


def loss(data, y):
    return 2 * (y**2 + 1) * data  # of which Keras takes the mean over two rows


def ours():
    return (1 - our_weight(np.ones((2, 1)), DATA[:, None], loss)) / 0.1


def step(devices):
    mapped = jax.pmap(gradients, "rows", in_axes=(None, 0), devices=devices)
    return mapped(1.0, DATA.reshape(len(devices), -1))


exhibit_devices(__doc__, step, ours)
