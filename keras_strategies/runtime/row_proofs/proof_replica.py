"""Collectives of the replica on which a layer call is proved: results are marked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from keras_strategies.runtime.replicas.collectives import (
    DefinesGradient,
    MergeArguments,
    ReplicaCollectives,
    call_merged,
)
from keras_strategies.types import ReduceOp


class MarkedCollectives(ReplicaCollectives):
    """Collectives with results that are the same on all replicas.

    Args:
        reduced: callable of a tensor; returns one of its shape that is the same on all
            replicas, and with a gradient that is.
        gathered: callable of a tensor, an axis and whether shapes are equal on all
            replicas; returns one of the shape of all replicas' tensors, which is the
            same on all.
        merged: returns the result of a merged function as one that is the same on all.
        custom_gradient: see `ReplicaCollectives`.
    """

    def __init__(
        self,
        reduced: Callable[[Any], Any],
        gathered: Callable[[Any, int, bool], Any],
        merged: Callable[[Any], Any],
        custom_gradient: Callable[[DefinesGradient], Callable[[Any], Any]],
    ):
        self._reduced = reduced
        self._gathered = gathered
        self._merged = merged
        self.custom_gradient = custom_gradient

    def all_reduce(
        self, replica: int, op: ReduceOp, tensors: Sequence[Any]
    ) -> Sequence[Any]:
        return [self._reduced(tensor) for tensor in tensors]

    def all_gather(
        self, replica: int, tensors: Sequence[Any], axis: int, are_equal: bool = False
    ) -> Sequence[Any]:
        return [self._gathered(tensor, axis, are_equal) for tensor in tensors]

    def merge_call(
        self, replica: int, merge: Callable[..., Any], arguments: MergeArguments
    ) -> Any:
        return self._merged(call_merged(merge, [arguments])[0])


def gathered_size(size: int, rows: int | None, total: Any, replicas: int) -> Any:
    """The length of an axis that is concatenated over replicas.

    Args:
        size: int, the length on one replica.
        rows: int, the number of rows of the replica; None for any number, or if the
            length is equal on all replicas.
        total: the number of rows of all replicas.
        replicas: int, how many replicas there are.
    """
    if rows is not None and size % rows == 0:
        return size // rows * total
    return size * replicas
