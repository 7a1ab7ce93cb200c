"""The current strategy and replica context, the default ones included."""

from __future__ import annotations

from keras_strategies.errors import InvalidArgumentError
from keras_strategies.runtime import context
from keras_strategies.runtime.replica_context import ReplicaContext
from keras_strategies.strategies.base.strategy import Strategy
from keras_strategies.strategies.default import DefaultStrategy


def get_strategy() -> Strategy:
    """The current strategy; the default one outside every scope.

    Returns:
        A `Strategy`.

    Example:

    >>> with strategy.scope():
    ...     assert ks.get_strategy() is strategy
    """
    strategy = context.current_strategy() or DefaultStrategy()
    assert isinstance(strategy, Strategy)
    return strategy


def get_replica_context() -> ReplicaContext | None:
    """The current replica's context.

    Returns:
        A `ReplicaContext` inside `run`, and outside every scope that of the default
        strategy; None in cross-replica context.

    Example:

    >>> def fn():
    ...     return ks.get_replica_context().replica_id_in_sync_group
    >>> strategy.run(fn)
    """
    strategy = context.current_strategy()
    if strategy is not None:
        return context.current_replica() or strategy.replica_context_in_scope
    return DefaultStrategy().default_replica_context


def experimental_set_strategy(strategy: Strategy | None) -> None:
    """Makes a strategy current until the next call, as an open scope would.

    Args:
        strategy: a strategy, or None to go back to the default one.

    Raises:
        ValueError: if `strategy` is something else.
        RuntimeError: inside a scope.

    Example:

    >>> ks.experimental_set_strategy(ks.MirroredStrategy())
    >>> model = keras.Sequential([keras.layers.Dense(1)])
    >>> ks.experimental_set_strategy(None)
    """
    if strategy is not None and not isinstance(strategy, Strategy):
        raise InvalidArgumentError(
            "`experimental_set_strategy` expects a strategy such as "
            "ks.MirroredStrategy(), or None for the default strategy. Received: "
            f"{strategy!r} of type {type(strategy).__name__}"
        )
    is_default = strategy is DefaultStrategy()
    context.set_strategy(None if is_default else strategy)
