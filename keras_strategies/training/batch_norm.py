"""Batch normalization over the global batch, on replicas."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import keras
from keras import ops

from keras_strategies.runtime.replica_context import ReplicaContext
from keras_strategies.types import ReduceOp


def replica_moments(
    replica: ReplicaContext, layer: Any, inputs: Any, mask: Any
) -> tuple[Any, Any]:
    """Mean and variance of a `BatchNormalization` layer's global input.

    Each replica sends its count, mean and sum of squared deviations in one message;
    they are combined as in Chan, Golub and LeVeque, "Updating formulae and a
    pairwise algorithm for computing sample variances" (1979), which avoids the
    cancellation of E[x^2] - E[x]^2.

    Args:
        replica: the replica that this runs on.
        layer: a `keras.layers.BatchNormalization`.
        inputs: float tensor, this replica's rows.
        mask: None, or a bool tensor of one dimension less, False at positions to
            ignore.

    Returns:
        Two tensors of shape `(channels,)`, equal on all replicas; differentiable.
    """
    channel = layer.axis % len(inputs.shape)
    axes = [i for i in range(len(inputs.shape)) if i != channel]
    weights = None
    if mask is not None:
        weights = ops.cast(ops.expand_dims(mask, -1), inputs.dtype)
        weights = ops.broadcast_to(weights, ops.shape(inputs))
        inputs = ops.where(ops.cast(weights, "bool"), inputs, 0)
    return replica.with_gradient(
        lambda inputs: _moments(replica, inputs, axes, weights), inputs
    )


def _moments(
    replica: ReplicaContext, inputs: Any, axes: list[int], weights: Any
) -> tuple[tuple[Any, Any], Callable[[Any, Any], Any]]:
    """Mean and variance, and their gradient.

    Args:
        replica: the replica that this runs on.
        inputs: the replica's rows, zero where they are masked.
        axes: the axes of the statistics.
        weights: 1 or 0 for each entry; None without a mask.
    """
    total = ops.sum(inputs, axes)
    if weights is None:
        shape = ops.shape(inputs)
        # Ints first: in a program for any number of rows, one tensor multiplication.
        positions = math.prod(sorted((shape[i] for i in axes), key=ops.is_tensor))
        # On Torch, `full_like` reads the number from the device, and the host waits.
        if ops.is_tensor(positions):
            positions = ops.cast(positions, total.dtype)
        count, tiny = ops.ones_like(total) * positions, 0.0
    else:
        # Keras also adds it to the count of a masked batch on one device.
        count, tiny = ops.sum(weights, axes), keras.config.epsilon()
    mean = total / ops.maximum(count, 1.0)

    def weighted(values: Any) -> Any:
        return values if weights is None else values * weights

    spread = ops.sum(weighted(ops.square(inputs - _along(mean, inputs, axes))), axes)
    mean, variance, total = _combined(replica, count, mean, spread, tiny)

    def gradient(of_mean: Any, of_variance: Any) -> Any:
        both = replica.all_reduce(ReduceOp.SUM, ops.stack([of_mean, of_variance]))
        of_mean, of_variance = ops.unstack(both / total)
        deviations = inputs - _along(mean, inputs, axes)
        slope = _along(2.0 * of_variance, inputs, axes)
        return weighted(_along(of_mean, inputs, axes) + slope * deviations)

    return (mean, variance), gradient


def _combined(
    replica: ReplicaContext, count: Any, mean: Any, spread: Any, tiny: float = 0.0
) -> tuple[Any, Any, Any]:
    """Mean, variance and count of all replicas, from those of each one."""
    own = ops.stack([count, mean, spread])
    every = replica.gather_batch_statistics(ops.expand_dims(own, 0))
    counts, means, spreads = ops.unstack(every, axis=1)
    total = ops.sum(counts, 0) + tiny if tiny else ops.sum(counts, 0)
    global_mean = ops.sum(counts * means, 0) / total
    between = counts * ops.square(means - global_mean)
    return global_mean, ops.sum(spreads + between, 0) / total, total


def _along(values: Any, inputs: Any, axes: list[int]) -> Any:
    """Values of the channels in a shape that broadcasts to that of the inputs."""
    if axes == list(range(len(axes))):
        return values
    return ops.reshape(
        values, [1 if i in axes else -1 for i in range(len(inputs.shape))]
    )
