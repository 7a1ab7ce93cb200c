"""Gradients of sharded variables: each shard's is summed on its device.

A gradient is one tensor for Keras, which clips and unscales it. It refers to its parts,
and if Keras passes it to the update as it is, shards are updated from these. In a
program the tensor is then computed nowhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_strategies.engines.tensorflow.sharding.variables_in_shards import (
    VariableInShards,
)
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
