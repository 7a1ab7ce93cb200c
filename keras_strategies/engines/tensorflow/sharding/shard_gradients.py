"""Gradients of sharded variables: each shard's is summed on its device.

A gradient is one tensor for tapes and for code of the user. It refers to its parts, and
if that code passes it to the optimizer as it is, the optimizer gets a
`GradientInShards` and computes with the parts. A program then computes the tensor
nowhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_strategies.engines.tensorflow.sharding.variables_in_shards import (
    VariableInShards,
)
from keras_strategies.keras_compat.variables.values import raw_value
from keras_strategies.runtime.replicas.tensor_primitives import TensorPrimitives

_PARTS = "_keras_strategies_parts"


def sums_of_parts(
    ops: TensorPrimitives,
    variable: VariableInShards,
    gradients: Sequence[Any],
    devices: Sequence[str],
) -> list[Any]:
    """The gradient of each shard, on its device: a reduce-scatter. Not rounded.

    Args:
        ops: the functions of the framework's tensors.
        variable: the variable.
        gradients: of the replicas, or None; dense, at least one.
        devices: the replicas' devices.
    """
    columns = []
    for gradient, device in zip(gradients, devices, strict=True):
        if gradient is not None:
            with tf.device(device):
                columns.append(variable.parts_of(gradient))
    found = []
    columns_of_shards = list(zip(*columns, strict=True))
    for shard, terms in variable.own_parts(columns_of_shards):
        with tf.device(shard.device):
            wide = [ops.widened(term) for term in terms]
            found.append(ops.add(wide) if len(wide) > 1 else wide[0])
    return found


def set_parts(gradient: Any, parts: Sequence[Any]) -> None:
    """Makes a gradient refer to its parts, one for each shard."""
    setattr(gradient, _PARTS, tuple(parts))


def parts_of(variable: VariableInShards, gradient: Any) -> Sequence[Any]:
    """The parts that a gradient refers to, or those that it is split into."""
    found: Sequence[Any] | None = getattr(gradient, _PARTS, None)
    return variable.parts_of(gradient) if found is None else found


class GradientInShards:
    """A gradient as the parts of a variable's shards, each on the device of its shard.

    Products with numbers are of this kind too. Other functions of TensorFlow convert it
    to one tensor.

    Args:
        variable: the variable, all of whose shards are in this process.
        parts: tensors, in the order of the shards.
    """

    def __init__(self, variable: VariableInShards, parts: Sequence[Any]):
        self.variable = variable
        self.parts = list(parts)

    @classmethod
    def of(cls, variable: Any, gradient: Any) -> Any:
        """What an optimizer gets as the gradient of a variable, of Keras or not."""
        is_of_keras = isinstance(variable, keras.Variable)
        raw = raw_value(variable) if is_of_keras else variable
        is_dense = tf.is_tensor(gradient) and not isinstance(gradient, tf.IndexedSlices)
        if not isinstance(raw, VariableInShards) or not is_dense:
            return gradient
        return cls(raw, parts_of(raw, gradient)) if raw.grid.is_complete else gradient

    @property
    def dtype(self) -> tf.DType:
        return self.parts[0].dtype

    @property
    def shape(self) -> tf.TensorShape:
        return self.variable.shape

    def map(self, fn: Callable[[Any], Any]) -> GradientInShards:
        """The results of a function of each part."""
        found = []
        for number, part in enumerate(self.parts):
            with tf.device(self.variable.shards[number].device):
                found.append(fn(part))
        return GradientInShards(self.variable, found)

    def squared_norm(self) -> Any:
        """The sum of the squares of all entries."""
        return tf.add_n(self.map(lambda part: tf.reduce_sum(part * part)).parts)

    def __mul__(self, number: Any) -> GradientInShards:
        return self.map(lambda part: part * tf.cast(number, part.dtype))

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> Any:
        value = self.variable.grid.join(self.parts, tf.concat)
        return value if dtype is None else tf.cast(value, dtype)
