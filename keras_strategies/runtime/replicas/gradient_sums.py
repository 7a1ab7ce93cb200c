"""Sums of gradients over replicas and workers.

Gradients of half precision are summed in float32 and rounded once, to the dtype that
they have on one device. A gradient is None where nothing depends on the variable.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import keras

from keras_strategies.communication.communicator import Communicator
from keras_strategies.runtime.replicas.tensor_primitives import TensorPrimitives
from keras_strategies.types import ReduceOp
from keras_strategies.values import DistributedValues


def sums_over_replicas(
    ops: TensorPrimitives, columns: Sequence[Sequence[Any]]
) -> list[Any]:
    """Sums gradients over the replicas of this process, in float32 at least.

    Args:
        ops: the functions of the framework's tensors.
        columns: for each variable the gradient of each replica, on the device of sums.

    Returns:
        list with a gradient or None for each variable, sparse where its terms are.
    """
    return [
        _sum(ops, [ops.widened(part) for part in column if part is not None])
        for column in columns
    ]


def largest_over_replicas(
    ops: TensorPrimitives, gradients: Sequence[Any], near: Any
) -> Any:
    """The largest of new values, which overwrite a variable; None without any.

    Args:
        ops: the functions of the framework's tensors.
        gradients: of each replica, or None.
        near: a tensor on the device of the result.
    """
    parts = [ops.to_device_of(part, near) for part in gradients if part is not None]
    return functools.reduce(keras.ops.maximum, parts) if parts else None


def _sum(ops: TensorPrimitives, gradients: Sequence[Any]) -> Any:
    if len(gradients) < 2:
        return gradients[0] if gradients else None
    if _are_sparse(ops, gradients):
        assert ops.sparse is not None
        return ops.sparse.join(gradients)
    return ops.add(gradients)


def _are_sparse(ops: TensorPrimitives, column: Sequence[Any]) -> bool:
    present = [gradient for gradient in column if gradient is not None]
    if ops.sparse is None or not present:
        return False
    return all(map(ops.sparse.is_sparse, present))


def sums_over_workers(
    ops: TensorPrimitives, gradients: Sequence[Any], workers: Communicator | None
) -> list[Any]:
    """Sums gradients over workers; a gradient must be None on all workers or on none.

    Gradients of the last layers, which are computed first, are sent first. Sparse
    gradients stay sparse.
    """
    results = list(gradients)
    if workers is None:
        return results
    present = [i for i, gradient in enumerate(gradients) if gradient is not None]
    dense = [i for i in reversed(present) if not _are_sparse(ops, [gradients[i]])]
    totals = workers.all_reduce(ReduceOp.SUM, [gradients[i] for i in dense])
    for i, total in zip(dense, totals, strict=True):
        results[i] = total
    for i in sorted(set(present) - set(dense)):
        assert ops.sparse is not None
        results[i] = ops.sparse.gather(gradients[i], workers)
    workers.use_unconfirmed()
    return results


def rounded(ops: TensorPrimitives, total: Any, gradient: Any) -> Any:
    """A sum in the dtype of its terms, a tensor or a `PerReplica` of them."""
    terms = gradient.values if isinstance(gradient, DistributedValues) else [gradient]
    dtypes = [term.dtype for term in terms if term is not None]
    return ops.cast(total, dtypes[0]) if total is not None and dtypes else total
