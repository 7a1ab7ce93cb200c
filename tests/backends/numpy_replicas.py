"""NumPy's tensors, for the engine of the tests."""

from __future__ import annotations

import numpy as np

from keras_strategies.keras_compat.variables.values import raw_value
from keras_strategies.runtime.replicas.tensor_primitives import TensorPrimitives
from keras_strategies.types import ReduceOp

_REDUCTIONS = {
    ReduceOp.SUM: np.sum,
    ReduceOp.MEAN: np.mean,
    ReduceOp.MIN: np.min,
    ReduceOp.MAX: np.max,
}


class NumpyPrimitives(TensorPrimitives):
    def concatenate(self, tensors, axis=0):
        return np.concatenate(list(tensors), axis)

    def split(self, tensor, sizes, axis=0):
        return np.split(tensor, np.cumsum(sizes)[:-1], axis)

    def reshape(self, tensor, shape):
        return np.reshape(tensor, shape)

    def move_axis(self, tensor, source, destination):
        return np.moveaxis(tensor, source, destination)

    def reduce(self, op, tensors):
        return _REDUCTIONS[op](np.stack(list(tensors)), axis=0)

    def add(self, tensors):
        return sum(tensors[1:], start=tensors[0])

    def widened(self, tensor):
        return tensor.astype("float32") if tensor.dtype == "float16" else tensor

    def cast(self, tensor, dtype):
        return tensor.astype(dtype)

    def to_device(self, tensor, device):
        return tensor

    def read(self, variable):
        return np.array(raw_value(variable))

    def assign(self, variable, value):
        variable._value = np.asarray(value, variable.dtype)

    def to_device_of(self, tensor, other):
        return tensor

    def all_lengths(self, lengths, workers, counts):
        return workers.gather_rows(np.asarray(lengths), counts).tolist()
