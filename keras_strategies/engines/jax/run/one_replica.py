"""`run` with one replica: a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import keras

from keras_strategies import context, keras_compat
from keras_strategies.engines.jax.function.trace_scopes import TraceScope
from keras_strategies.runtime.base import Communicator
from keras_strategies.types import ReduceOp
from keras_strategies.values import (
    map_structure,
)

if TYPE_CHECKING:
    from keras_strategies.strategies.base import Strategy


class _Alone(Communicator):
    """The only replica: what it has is what all have."""

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
        replica = context.current_replica()
        assert replica is not None
        with context.merged_replicas(replica.strategy):
            return merge_fn(replica.strategy, *args, **kwargs)


def run_alone(
    strategy: Strategy,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Calls a function on the only replica, whose device has the variables too."""
    scope = keras_compat.current_stateless_scope()
    root = scope.root if isinstance(scope, TraceScope) else None
    if root is not None:
        root.strategies[id(strategy)] = strategy
    with context.on_replica(context.ReplicaContext(strategy, 0, _Alone())):
        return fn(*args, **kwargs)
