"""What is read after a step is what the variables hold, and stays as it is."""

from __future__ import annotations

import keras
import numpy as np

import keras_strategies as ks
from keras_strategies.verification.variable_reader import VariableReader


def test_values_of_each_step() -> None:
    with ks.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        variables = [
            keras.Variable(np.arange(6, dtype="float32").reshape(2, 3)),
            keras.Variable(1, dtype="int32", trainable=False),
            keras.Variable(np.ones(2), dtype="bfloat16"),
        ]
    alone = keras.Variable(np.zeros(3, "float32"))
    reader, reads = VariableReader(), []
    for step in range(4):
        if step == 3:  # A metric makes its variables late.
            variables.append(alone)
        for each in variables:
            each.assign(keras.ops.full(each.shape, step, each.dtype))
        reads.append(reader.read(variables))
    shapes = [(2, 3), (), (2,), (3,)]
    for step, values in enumerate(reads):
        assert [each.shape for each in values] == shapes[: 3 + (step == 3)]
        dtypes = [each.dtype.name for each in values[:3]]
        assert dtypes == ["float32", "int32", "float32"]
        for each in values:
            np.testing.assert_array_equal(each, step)
