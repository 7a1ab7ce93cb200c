"""Broadcast of variables from the chief to all workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from keras_strategies.keras_compat.models.building import all_variables, build_optimizer
from keras_strategies.keras_compat.variables.values import raw_value

if TYPE_CHECKING:
    from keras_strategies.runtime.engine import StrategyCore


def sync_model(strategy: StrategyCore, model: Any, all_of_them: bool) -> None:
    """Broadcasts a model's variables from the chief, with several workers.

    Args:
        strategy: the strategy of the model.
        model: a `keras.Model`, possibly not built.
        all_of_them: bool, whether to include variables that are in sync already.
    """
    if strategy.workers is None:
        return
    if all_of_them:
        # The chief's optimizer may be built, if it has restored a file.
        build_optimizer(model)
    sync_variables(strategy, all_variables(model), all_of_them)


def sync_variables(
    strategy: StrategyCore, variables: Sequence[Any], all_of_them: bool = False
) -> None:
    """Broadcasts variables with values from the chief; see `sync_model`.

    Raises:
        WorkerError: if the variables differ between workers.
    """
    workers = strategy.workers
    assert workers is not None
    synced, sharding = strategy.synced_variables, strategy.drivers.sharding
    if not all_of_them:
        variables = [v for v in variables if v not in synced]
    workers.group.agree(
        "the model's variables (their shapes and dtypes)",
        [[list(variable.shape), variable.dtype] for variable in variables],
    )
    if not variables:
        return
    full = variables if sharding is None else sharding.unsharded(variables)
    values = [raw_value(variable) for variable in full]
    for variable, value in zip(full, workers.broadcast(values), strict=True):
        variable.assign(value)
    for variable in variables:
        synced.add(variable)


def are_synced(strategy: StrategyCore, model: Any) -> list[bool]:
    """Whether each variable of a model has been synchronized between workers."""
    return [v in strategy.synced_variables for v in all_variables(model)]


def set_synced(strategy: StrategyCore, model: Any, synced: Sequence[bool]) -> None:
    """Restores what `are_synced` returned on another worker."""
    for variable, is_synced in zip(all_variables(model), synced, strict=True):
        if is_synced:
            strategy.synced_variables.add(variable)
        else:
            strategy.synced_variables.discard(variable)
