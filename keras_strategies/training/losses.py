"""Losses in custom loops: averages over the global batch."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from keras_strategies.errors import ContextError, InvalidArgumentError
from keras_strategies.runtime import context


def compute_average_loss(
    per_example_loss: Any,
    sample_weight: Any = None,
    global_batch_size: Any = None,
) -> Any:
    """This replica's share of the average loss over the global batch.

    The parts of all replicas add up to the average, so that their gradients, which
    optimizers sum, are those of the average.

    Args:
        per_example_loss: float tensor of shape `(rows,)` or more, one loss per
            example of this replica.
        sample_weight: tensor that broadcasts to it, or None.
        global_batch_size: int or scalar integer tensor, rows of the global batch;
            None to count the rows of all replicas.

    Returns:
        A scalar float tensor.

    Raises:
        ValueError: for a loss without a batch axis or a batch size that is not a
            non-negative integer scalar.
        RuntimeError: in cross-replica context.

    Example:

    >>> float(ks.compute_average_loss([1., 2., 3., 4., 5.], global_batch_size=10))
    1.5
    """
    _check_not_cross_replica("compute_average_loss")
    loss = ops.convert_to_tensor(per_example_loss)
    if len(loss.shape) == 0:
        raise InvalidArgumentError(
            "`compute_average_loss` needs one loss per example but received a "
            "scalar. Create the loss with `reduction=None`."
        )
    if "float" not in keras.backend.standardize_dtype(loss.dtype):
        loss = ops.cast(loss, keras.config.floatx())
    if sample_weight is not None:
        loss = loss * ops.cast(ops.convert_to_tensor(sample_weight), loss.dtype)
    return ops.sum(loss) / _global_rows(loss, global_batch_size)


def _global_rows(loss: Any, given: Any) -> Any:
    if given is None:
        rows = ops.shape(loss)[0]
        # A Python number where it is known: JAX sums it in the trace.
        total: Any = (
            float(rows) if isinstance(rows, int) else ops.cast(rows, loss.dtype)
        )
        replica = context.current_replica()
        if replica is not None:
            total = replica.all_reduce("SUM", total)
        total = ops.cast(total, loss.dtype)
        # No rows on any replica: an empty sum, not a division by zero.
        return ops.maximum(total, 1)
    is_tensor = ops.is_tensor(given)
    if is_tensor and len(given.shape) == 0 and "int" in str(given.dtype):
        return ops.cast(given, loss.dtype)
    if not is_tensor and isinstance(given, int) and given >= 0:
        return ops.cast(max(given, 1), loss.dtype)
    raise InvalidArgumentError(
        "`global_batch_size` must be the number of rows of the global batch, an "
        f"integer of 0 or more. Received: {given!r}"
    )


def scale_regularization_loss(regularization_loss: Any) -> Any:
    """This replica's share of a loss that is the same on all replicas.

    Args:
        regularization_loss: tensor or list of tensors, such as `model.losses` when
            these are terms of the weights.

    Returns:
        A scalar tensor, the sum divided by the number of replicas; 0 for no losses.

    Raises:
        RuntimeError: in cross-replica context.
    """
    _check_not_cross_replica("scale_regularization_loss")
    losses = keras.tree.flatten(regularization_loss)
    if not losses:
        return ops.zeros((), dtype=keras.config.floatx())
    replica = context.current_replica()
    count = 1 if replica is None else replica.num_replicas_in_sync
    return sum(ops.sum(ops.convert_to_tensor(loss)) for loss in losses) / count


def _check_not_cross_replica(name: str) -> None:
    if context.in_cross_replica_context():
        raise ContextError(
            f"`{name}` returns one replica's share but was called in cross-replica "
            "context. Call it in the function that you pass to `strategy.run`."
        )
