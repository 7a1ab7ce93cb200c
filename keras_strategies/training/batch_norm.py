"""Batch normalization over the global batch, on replicas."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from keras_strategies.context import ReplicaContext


def replica_moments(
    replica: ReplicaContext, layer: Any, inputs: Any, mask: Any
) -> tuple[Any, Any]:
    """Mean and variance of a `BatchNormalization` layer's global input.

    Each replica sends its count, mean and sum of squared deviations in one message;
    they are combined as in Chan, Golub and LeVeque, "Updating formulae and a
    pairwise algorithm for computing sample variances" (1979), which does not
    subtract large numbers from each other as E[x^2] - E[x]^2 does.

    Args:
        replica: the replica that this runs on.
        layer: a `keras.layers.BatchNormalization`.
        inputs: float tensor, this replica's rows.
        mask: None, or a bool tensor of one dimension less, False where a position
            does not count.

    Returns:
        Two tensors of shape `(channels,)`, equal on all replicas; differentiable.
    """
    axes = [i for i in range(len(inputs.shape)) if i != layer.axis % len(inputs.shape)]
    if mask is None:
        weights = ops.ones_like(inputs)
        tiny = 0.0
    else:
        weights = ops.cast(ops.expand_dims(mask, -1), inputs.dtype)
        weights = ops.broadcast_to(weights, ops.shape(inputs))
        inputs = ops.where(ops.cast(weights, "bool"), inputs, 0)
        # Keras adds it to the count of a masked batch, on one device too.
        tiny = keras.config.epsilon()
    count = ops.sum(weights, axes, keepdims=True)
    mean = ops.sum(inputs, axes, keepdims=True) / ops.maximum(count, 1.0)
    spread = ops.sum(weights * ops.square(inputs - mean), axes, keepdims=True)

    flat = [ops.reshape(value, (1, -1)) for value in (count, mean, spread)]
    every = replica.gather_batch_statistics(ops.stack(flat, axis=1))
    counts, means, spreads = every[:, 0], every[:, 1], every[:, 2]

    total = ops.sum(counts, 0) + tiny
    global_mean = ops.sum(counts * means, 0) / total
    between = counts * ops.square(means - global_mean)
    variance = ops.sum(spreads + between, 0) / total
    return global_mean, variance
