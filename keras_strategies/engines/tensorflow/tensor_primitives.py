"""TensorFlow's functions for combining the tensors of replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_strategies.engines.tensorflow.data_parallel.gradient_sums import widened
from keras_strategies.runtime.replicas.replica_set import TensorPrimitives
from keras_strategies.runtime.workers import Workers
from keras_strategies.types import ReduceOp


class TensorFlowPrimitives(TensorPrimitives):
    """Operations on the current device, eagerly and in programs."""

    def concatenate(self, tensors: Sequence[Any], axis: int = 0) -> Any:
        return tf.concat(list(tensors), axis)

    def stack(self, tensors: Sequence[Any]) -> Any:
        return tf.stack(list(tensors))

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
        wide = [widened(tensor) for tensor in tensors]
        is_sum = op is ReduceOp.SUM
        total = tf.add_n(wide) if is_sum else tf.reduce_mean(tf.stack(wide), 0)
        return tf.cast(total, tensors[0].dtype)

    def to_device_of(self, tensor: Any, other: Any) -> Any:
        # Operations take tensors of any device.
        return tensor

    def all_lengths(
        self, lengths: Sequence[Any], workers: Workers, counts: Sequence[int]
    ) -> list[Any]:
        is_static = all(isinstance(length, int) for length in lengths)
        if is_static and not tf.executing_eagerly():
            # Once, while a program is made, and not whenever it runs.
            found = workers.group.gather_values("the lengths to gather", list(lengths))
            return [length for each in found for length in each]
        every = workers.gather_rows(tf.stack(list(lengths)), counts)
        return list(tf.unstack(every, sum(counts)))


PRIMITIVES = TensorFlowPrimitives()
