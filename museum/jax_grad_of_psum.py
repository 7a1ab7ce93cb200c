"""The gradient of a sum over devices is not the gradient of the sum.

`jax.grad` of a loss that ends in `psum`, inside of `pmap`: the loss is that of all
rows, the gradient of a device that of its own rows, times the number of devices.

Framework: JAX
Reported: jax, 2020-08; open
Link: https://github.com/jax-ml/jax/issues/3970
Published: gradients of 0 and 4 on two devices instead of 2
Number: the gradient on the second device
Upstream: `pmap` still transposes `psum` to `psum`, where `shard_map` has types.
"""

import jax
import numpy as np

import keras_strategies as ks
from museum.common import exhibit, our_weight

ks.set_virtual_cpu_devices(2)
DATA = np.array([0.0, 1.0], "float32")


def gradients(w, data):
    return jax.grad(lambda w: jax.lax.psum((w**2 + 1) * data.sum(), "rows"))(w)


def loss(data, y):
    return 2 * (y**2 + 1) * data  # of which Keras takes the mean over two rows


def ours():
    return (1 - our_weight(np.ones((2, 1)), DATA[:, None], loss)) / 0.1


on_one_device = jax.grad(lambda w: ((w**2 + 1) * DATA).sum())
on_two_devices = jax.pmap(gradients, "rows", in_axes=(None, 0))
exhibit(__doc__, lambda: on_two_devices(1.0, DATA)[1], lambda: on_one_device(1.0), ours)
