"""Communicators of one replica and of several."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import keras

from keras_strategies import context
from keras_strategies.runtime.communicator import Communicator
from keras_strategies.types import ReduceOp
from keras_strategies.values import map_structure, regroup, select_replica

if TYPE_CHECKING:
    from keras_strategies.runtime.engine import StrategyCore


#: Arguments and keyword arguments of one replica.
MergeArguments = tuple[tuple[Any, ...], dict[str, Any]]


class SingleReplica(Communicator):
    """Communicator of one replica: every collective returns its argument.

    Args:
        strategy: the strategy that merged functions get.
    """

    def __init__(self, strategy: StrategyCore):
        self._strategy = strategy

    def all_reduce(self, replica_id: int, op: ReduceOp, value: Any) -> Any:
        return map_structure(keras.ops.convert_to_tensor, value)

    def all_gather(self, replica_id: int, value: Any, axis: int) -> Any:
        return map_structure(keras.ops.convert_to_tensor, value)

    def merge_call(
        self,
        replica_id: int,
        merge_fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        with context.merged_replicas(self._strategy):
            return merge_fn(self._strategy, *args, **kwargs)


class ReplicaCollectives(abc.ABC):
    """Collectives of an engine's replicas, on lists of tensors.

    `replica` is the number of the calling replica among those of this process.
    """

    @abc.abstractmethod
    def all_reduce(
        self, replica: int, op: ReduceOp, tensors: Sequence[Any]
    ) -> Sequence[Any]:
        """Reduces each tensor over replicas; its gradient is the same reduction."""

    @abc.abstractmethod
    def all_gather(
        self, replica: int, tensors: Sequence[Any], axis: int
    ) -> Sequence[Any]:
        """Concatenates each tensor over replicas along `axis`; differentiable."""

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


class ReplicaCommunicator(Communicator):
    """Communicator of several replicas.

    Args:
        strategy: the strategy that merged functions get.
        collectives: the engine's collectives.
        first: int, the number of this process's first replica.
    """

    def __init__(
        self, strategy: StrategyCore, collectives: ReplicaCollectives, first: int = 0
    ):
        self._strategy = strategy
        self._collectives = collectives
        self._first = first

    def all_reduce(self, replica_id: int, op: ReduceOp, value: Any) -> Any:
        found = self._collectives.all_reduce(
            self._local(replica_id), op, _tensors(value)
        )
        return keras.tree.pack_sequence_as(value, list(found))

    def all_gather(self, replica_id: int, value: Any, axis: int) -> Any:
        found = self._collectives.all_gather(
            self._local(replica_id), _tensors(value), axis
        )
        return keras.tree.pack_sequence_as(value, list(found))

    def merge_call(
        self,
        replica_id: int,
        merge_fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        def merge(*args: Any, **kwargs: Any) -> Any:
            with context.merged_replicas(self._strategy):
                return merge_fn(self._strategy, *args, **kwargs)

        return self._collectives.merge_call(
            self._local(replica_id), merge, (tuple(args), dict(kwargs))
        )

    def _local(self, replica_id: int) -> int:
        # In one trace of all replicas the number is a tensor.
        return replica_id - self._first if self._first else replica_id


def _tensors(value: Any) -> list[Any]:
    return [keras.ops.convert_to_tensor(leaf) for leaf in keras.tree.flatten(value)]
