"""Functions of TensorFlow that combine the tensors of replicas."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_strategies.communication.communicator import Communicator
from keras_strategies.devices import Device
from keras_strategies.engines.tensorflow.compat.gradients import is_recorded
from keras_strategies.engines.tensorflow.compat.graphs import is_in_program
from keras_strategies.engines.tensorflow.data_parallel.row_parts import row_parts
from keras_strategies.keras_compat.variables.values import raw_value
from keras_strategies.runtime.replicas.tensor_primitives import (
    SparseGradients,
    TensorPrimitives,
)
from keras_strategies.types import ReduceOp


class RowsOfTables(SparseGradients):
    """Gradients that are `tf.IndexedSlices`."""

    def is_sparse(self, gradient: Any) -> bool:
        return isinstance(gradient, tf.IndexedSlices)

    def join(self, gradients: Sequence[Any]) -> Any:
        values, indices = _joined(gradients)
        return tf.IndexedSlices(values, indices, gradients[0].dense_shape)

    def gather(self, gradient: Any, workers: Communicator) -> Any:
        own = tf.shape(gradient.indices)[:1]
        count = workers.group.count
        counts = tf.unstack(workers.gather_rows(own, [1] * count), count)
        # In one collective: the bits of an index are further columns of its row.
        values, indices = gradient.values, tf.cast(gradient.indices, tf.int64)
        shape, dtype = values.shape[1:], values.dtype
        width, more = math.prod(shape), tf.int64.size // dtype.size
        bits = tf.reshape(tf.bitcast(indices, dtype), [-1, more])
        rows = tf.concat([tf.reshape(values, [-1, width]), bits], 1)
        rows = workers.gather_rows(rows, counts)
        bits = rows[:, width:] if more > 1 else rows[:, width]
        indices = tf.cast(tf.bitcast(bits, tf.int64), gradient.indices.dtype)
        values = tf.reshape(rows[:, :width], [-1, *shape])
        return tf.IndexedSlices(values, indices, gradient.dense_shape)


def _joined(slices: Sequence[Any]) -> tuple[Any, Any]:
    values = tf.concat([each.values for each in slices], 0)
    return values, tf.concat([each.indices for each in slices], 0)


class TensorFlowPrimitives(TensorPrimitives):
    """Operations on the current device, eagerly and in programs."""

    sparse = RowsOfTables()

    @property
    def row_parts(self) -> Callable[..., Any] | None:  # type: ignore[override]
        return row_parts if is_in_program() else None

    def may_have_gradient(self, tensor: Any) -> bool:
        return is_recorded([tensor])

    def concatenate(self, tensors: Sequence[Any], axis: int = 0) -> Any:
        return tf.concat(list(tensors), axis)

    def split(self, tensor: Any, sizes: Sequence[Any], axis: int = 0) -> list[Any]:
        return list(tf.split(tensor, list(sizes), axis=axis))

    def reshape(self, tensor: Any, shape: Sequence[int]) -> Any:
        return tf.reshape(tensor, shape)

    def move_axis(self, tensor: Any, source: int, destination: int) -> Any:
        order = list(range(len(tensor.shape)))
        order.insert(destination, order.pop(source))
        return tf.transpose(tensor, order)

    def reduce(self, op: ReduceOp, tensors: Sequence[Any]) -> Any:
        if op in (ReduceOp.MIN, ReduceOp.MAX):
            along = tf.reduce_min if op is ReduceOp.MIN else tf.reduce_max
            return along(tf.stack(list(tensors)), 0)
        wide = [self.widened(tensor) for tensor in tensors]
        is_sum = op is ReduceOp.SUM
        total = tf.add_n(wide) if is_sum else tf.reduce_mean(tf.stack(wide), 0)
        return tf.cast(total, tensors[0].dtype)

    def add(self, tensors: Sequence[Any]) -> Any:
        return tf.add_n([tf.convert_to_tensor(tensor) for tensor in tensors])

    def widened(self, tensor: Any) -> Any:
        is_half = tensor.dtype in (tf.float16, tf.bfloat16)
        return tf.cast(tensor, tf.float32) if is_half else tensor

    def cast(self, tensor: Any, dtype: Any) -> Any:
        return tensor if tensor.dtype == dtype else tf.cast(tensor, dtype)

    def to_device(self, tensor: Any, device: Device) -> Any:
        # Operations accept tensors on any device.
        return tensor

    def read(self, variable: Any) -> Any:
        return raw_value(variable).read_value()

    def read_with_gradient(self, variable: Any, like: Any) -> Any:
        return self.cast(tf.convert_to_tensor(raw_value(variable)), like.dtype)

    def assign(self, variable: Any, value: Any) -> None:
        raw_value(variable).assign(value)

    def to_device_of(self, tensor: Any, other: Any) -> Any:
        # Operations accept tensors on any device.
        return tensor

    def all_lengths(
        self, lengths: Sequence[Any], workers: Communicator, counts: Sequence[int]
    ) -> list[Any]:
        is_static = all(isinstance(length, int) for length in lengths)
        if is_static and not tf.executing_eagerly():
            # Once, during the trace, and not in each run of the program.
            found = workers.group.gather_values("the lengths to gather", list(lengths))
            return [length for each in found for length in each]
        every = workers.gather_rows(tf.stack(list(lengths)), counts)
        return list(tf.unstack(every, sum(counts)))


PRIMITIVES = TensorFlowPrimitives()
