"""Mirrored variables on TensorFlow, read on each device."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

START = np.array([[1, 2], [3, 4], [5, 6]], "float32")
ONES = np.ones((3, 2), "float32")


def copies_of(variable) -> dict[str, np.ndarray]:
    """What lies on each device, read there."""
    strategy = variable.__dict__["_keras_strategies_strategy"]
    found = {c.device: c.value.numpy() for c in strategy.drivers.fit.copies(variable)}
    assert all(
        f"CPU:{c.device[-1]}" in c.value.device
        for c in strategy.drivers.fit.copies(variable)
    )
    return found


def assert_everywhere(variable, expected) -> None:
    strategy = variable.__dict__["_keras_strategies_strategy"]
    found = copies_of(variable)
    assert list(found) == [str(device) for device in strategy.placement.replicas]
    for device, value in found.items():
        where = f"{variable.name} on {device}"
        np.testing.assert_array_equal(value, expected, err_msg=where)


def rows(indices, values):
    return tf.IndexedSlices(tf.constant(values, "float32"), tf.constant(indices))
