"""Collectives of a computation with one replica."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import keras

from keras_strategies import context
from keras_strategies.runtime.communicator import Communicator
from keras_strategies.types import ReduceOp
from keras_strategies.values import map_structure

if TYPE_CHECKING:
    from keras_strategies.runtime.engine import StrategyCore


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
