"""Collectives that replicas call in `run` and in layer calls."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any

from keras_strategies.types import ReduceOp
from keras_strategies.values import regroup, select_replica

#: Arguments and keyword arguments of one replica.
MergeArguments = tuple[tuple[Any, ...], dict[str, Any]]
#: A function of a tensor that defines its own gradient.
DefinesGradient = Callable[[Any], tuple[Any, Callable[..., Any]]]


class ReplicaCollectives(abc.ABC):
    """Collectives of replicas, on lists of tensors; `ReplicaContext` calls them.

    `replica` is the number of the calling replica among those of this process.
    """

    #: The number of this process's first replica among all.
    first: int = 0
    #: The framework's decorator for functions that define their own gradient: they
    #: return a tuple of tensors, and a function from their gradients to that of the
    #: argument. None where the framework differentiates their operations instead.
    custom_gradient: Callable[[DefinesGradient], Callable[[Any], Any]] | None = None

    @abc.abstractmethod
    def all_reduce(
        self, replica: int, op: ReduceOp, tensors: Sequence[Any]
    ) -> Sequence[Any]:
        """Reduces each tensor over replicas; its gradient is the same reduction."""

    def total(self, replica: int, number: int | float) -> int | float | None:
        """The sum of a Python number over replicas; None to sum it as a tensor."""
        return None

    @abc.abstractmethod
    def all_gather(
        self, replica: int, tensors: Sequence[Any], axis: int, are_equal: bool = False
    ) -> Sequence[Any]:
        """Concatenates each tensor over replicas along `axis`; differentiable.

        Args:
            replica: see above.
            tensors: the tensors.
            axis: int, the axis.
            are_equal: bool, whether shapes are known to be equal on all replicas, so
                that workers need not exchange lengths.
        """

    @abc.abstractmethod
    def merge_call(
        self, replica: int, merge: Callable[..., Any], arguments: MergeArguments
    ) -> Any:
        """Calls `merge` once with the regrouped arguments of all replicas.

        Returns:
            The component of this replica (`call_merged`).
        """


def call_merged(
    merge: Callable[..., Any], arguments: Sequence[MergeArguments]
) -> list[Any]:
    """Calls a merged function; a result for each replica."""
    args, kwargs = regroup(arguments)
    result = merge(*args, **kwargs)
    return [select_replica(i, result) for i in range(len(arguments))]


class SingleReplica(ReplicaCollectives):
    """Collectives of one replica: each returns its argument."""

    def all_reduce(
        self, replica: int, op: ReduceOp, tensors: Sequence[Any]
    ) -> Sequence[Any]:
        return tensors

    def all_gather(
        self, replica: int, tensors: Sequence[Any], axis: int, are_equal: bool = False
    ) -> Sequence[Any]:
        return tensors

    def merge_call(
        self, replica: int, merge: Callable[..., Any], arguments: MergeArguments
    ) -> Any:
        args, kwargs = arguments
        return merge(*args, **kwargs)
