"""Synchronized batch normalization averages means of unequal numbers of rows.

`pmean` of the devices' means is the mean only of equal parts. Hosts with unequal
batches, or images of unequal size, normalize by other statistics than one device.

Framework: Flax
Re-enacted: in jax, on two devices
Reported: flax, 2022-08
Link: https://github.com/google/flax/issues/2417
Number: the moving variance after a batch of five rows
"""

import jax
import numpy as np

from museum.common import exhibit_devices, our_batch_norm

X = np.array([[1.0], [2.0], [3.0], [10.0], [20.0]], "float32")


def step(devices):
    parts = np.array_split(X, len(devices))
    parts = list(map(jax.device_put, parts, devices))
    mean = np.mean([x.mean() for x in parts])
    mean_of_squares = np.mean([(x**2).mean() for x in parts])
    return 0.9 * 1.0 + 0.1 * (mean_of_squares - mean**2)


exhibit_devices(__doc__, step, lambda: our_batch_norm(X)[1])
