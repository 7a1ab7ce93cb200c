"""The replica on which a layer call is proved: results of collectives are marked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import keras

from keras_strategies import context
from keras_strategies.runtime.replicas.collectives import (
    MergeArguments,
    ReplicaCollectives,
    call_merged,
)
from keras_strategies.types import ReduceOp

if TYPE_CHECKING:
    from keras_strategies.runtime.engine import StrategyCore


class MarkedCollectives(ReplicaCollectives):
    """Collectives with results that are the same on all replicas.

    Each returns its argument, marked, and so does its gradient.

    Args:
        mark: callable of a tensor, which it returns as one that is the same on all
            replicas, and with a gradient that is.
        with_gradient: as `ReplicaContext.with_gradient`.
    """

    def __init__(
        self,
        mark: Callable[[Any], Any],
        with_gradient: Callable[[Callable[..., Any], Any], Any],
    ):
        self._mark = mark
        self._with_gradient = with_gradient

    def all_reduce(
        self, replica: int, op: ReduceOp, tensors: Sequence[Any]
    ) -> Sequence[Any]:
        return [self._mark(tensor) for tensor in tensors]

    def all_gather(
        self, replica: int, tensors: Sequence[Any], axis: int
    ) -> Sequence[Any]:
        return [self._mark(tensor) for tensor in tensors]

    def merge_call(
        self, replica: int, merge: Callable[..., Any], arguments: MergeArguments
    ) -> Any:
        result = call_merged(merge, [arguments])[0]
        return keras.tree.map_structure(
            lambda leaf: self._mark(leaf) if keras.ops.is_tensor(leaf) else leaf, result
        )

    def with_gradient(
        self, fn: Callable[..., tuple[Any, Callable[..., Any]]], tensor: Any
    ) -> Any:
        return self._with_gradient(fn, tensor)


class ProofReplica(context.ReplicaContext):
    """One of several replicas, with collectives that are marked.

    Batch normalization uses the statistics of the global batch, also where a strategy
    has statistics of each replica: these are what its user asked for.

    Args:
        strategy: the strategy.
        collectives: MarkedCollectives.
    """

    def __init__(self, strategy: StrategyCore, collectives: MarkedCollectives):
        super().__init__(strategy, 0, collectives, num_replicas=2)

    @property
    def shows_warnings(self) -> bool:
        # The call itself shows them.
        return False

    @property
    def synchronizes_batch_norm(self) -> bool:
        return True
