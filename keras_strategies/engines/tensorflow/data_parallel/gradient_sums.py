"""Sums of the replicas' gradients on TensorFlow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from keras_strategies.collectives.replica_ops import LocalReduction
from keras_strategies.types import ReduceOp
from keras_strategies.values import DistributedValues

if TYPE_CHECKING:
    from keras_strategies.runtime.workers import Workers


def sums_of(
    columns: Sequence[Sequence[Any]], reduction: LocalReduction | None
) -> list[Any]:
    """Sums gradients over the local replicas, on the current device.

    Those of half precision are summed in float32, which is returned.

    Args:
        columns: for each variable the gradient of each replica: a tensor,
            `tf.IndexedSlices`, or None, which adds nothing.
        reduction: the strategy's `CrossDeviceOps`, None for TensorFlow's own sum.

    Returns:
        list of tensors, of `tf.IndexedSlices` where all gradients of a variable are,
        and of None where there are none.
    """
    columns = [[widened(gradient) for gradient in column] for column in columns]
    if reduction is None:
        return [_sum([p for p in column if p is not None]) for column in columns]
    prepared = [_dense(column) for column in columns]
    sums = reduction.sums([dense for dense, _ in prepared])
    return [
        total if slices is None else tf.IndexedSlices(total, *slices)
        for total, (_, slices) in zip(sums, prepared, strict=True)
    ]


def _sum(gradients: Sequence[Any]) -> Any:
    """The sum of gradients; of rows of a table only, as their concatenation."""
    if len(gradients) < 2:
        return gradients[0] if gradients else None
    if _are_slices(gradients):
        values, indices = _joined(gradients)
        return tf.IndexedSlices(values, indices, gradients[0].dense_shape)
    return tf.add_n([tf.convert_to_tensor(gradient) for gradient in gradients])


def _are_slices(gradients: Sequence[Any]) -> bool:
    return all(isinstance(gradient, tf.IndexedSlices) for gradient in gradients)


def _joined(slices: Sequence[Any]) -> tuple[Any, Any]:
    values = tf.concat([each.values for each in slices], 0)
    return values, tf.concat([each.indices for each in slices], 0)


def _dense(column: Sequence[Any]) -> tuple[list[Any], tuple[Any, Any] | None]:
    """Tensors of one shape, and the indices and the shape of slices of a table.

    Rows of a table are summed as rows: each replica's tensor has the rows of all,
    zeros in place of the others'.
    """
    present = [gradient for gradient in column if gradient is not None]
    if not present or not _are_slices(present):
        return [
            None if gradient is None else tf.convert_to_tensor(gradient)
            for gradient in column
        ], None
    _, indices = _joined(present)
    dense: list[Any] = []
    for i, own in enumerate(column):
        if own is None:
            dense.append(None)
            continue
        parts = [
            other.values if i == j else tf.zeros_like(other.values)
            for j, other in enumerate(column)
            if other is not None
        ]
        dense.append(tf.concat(parts, 0))
    return dense, (indices, present[0].dense_shape)


def widened(gradient: Any) -> Any:
    """A tensor or the rows of a table, in float32 if it is of half precision."""
    is_half = gradient is not None and gradient.dtype in (tf.float16, tf.bfloat16)
    return tf.cast(gradient, tf.float32) if is_half else gradient


def in_dtype_of(total: Any, gradient: Any) -> Any:
    """A sum, rounded to the dtype of its terms, a tensor or a `PerReplica` of them."""
    is_several = isinstance(gradient, DistributedValues)
    terms = gradient.values if is_several else [gradient]
    dtypes = [term.dtype for term in terms if term is not None]
    if total is None or not dtypes or total.dtype == dtypes[0]:
        return total
    return tf.cast(total, dtypes[0])


def sums_over_workers(gradients: Sequence[Any], workers: Workers | None) -> list[Any]:
    """The sums over workers of gradients, which are of the same tensors on all.

    Those that come last in a layer are first in its backward pass, and travel while
    the rest of it is computed. Rows of a table stay rows.
    """
    if workers is None:
        return list(gradients)
    results = list(gradients)
    dense = [
        i
        for i, gradient in enumerate(gradients)
        if gradient is not None and not isinstance(gradient, tf.IndexedSlices)
    ][::-1]
    totals = workers.all_reduce(
        ReduceOp.SUM, [tf.convert_to_tensor(gradients[i]) for i in dense]
    )
    for i, total in zip(dense, totals, strict=True):
        results[i] = total
    for i, gradient in enumerate(gradients):
        if isinstance(gradient, tf.IndexedSlices):
            results[i] = _all_slices(gradient, workers)
    return results


def _all_slices(gradient: Any, workers: Workers) -> Any:
    own = tf.shape(gradient.indices)[:1]
    count = workers.group.count
    counts = tf.unstack(workers.gather_rows(own, [1] * count), count)
    return tf.IndexedSlices(
        workers.gather_rows(gradient.values, counts),
        workers.gather_rows(gradient.indices, counts),
        gradient.dense_shape,
    )
