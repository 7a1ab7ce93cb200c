"""Components of a value on the replicas of this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import keras

from keras_strategies.errors import InvalidArgumentError
from keras_strategies.keras_compat.variables.values import raw_value
from keras_strategies.runtime.state.run_state import is_local
from keras_strategies.values import DistributedValues, flatten, map_structure

if TYPE_CHECKING:
    from keras_strategies.runtime.engine import StrategyCore


def results(strategy: StrategyCore, value: Any) -> tuple[Any, ...]:
    """See `Strategy.experimental_local_results`."""
    if isinstance(value, DistributedValues):
        return value.values
    if isinstance(value, keras.Variable):
        return _of_variable(strategy, value)
    if not isinstance(value, (list, tuple, Mapping)):
        return (value,)
    columns = [
        results(strategy, leaf)
        if isinstance(leaf, (DistributedValues, keras.Variable))
        else (leaf,) * strategy.replicas_here
        for leaf in flatten(value)
    ]

    def own(replica: int) -> Any:
        rest = iter(columns)
        return map_structure(lambda _: next(rest)[replica], value)

    return tuple(own(replica) for replica in range(strategy.replicas_here))


def _of_variable(strategy: StrategyCore, variable: Any) -> tuple[Any, ...]:
    """A variable's value on each local replica."""
    if strategy.placement.replica_counts.count == 1:
        return (variable,)
    if raw_value(variable) is None:
        raise InvalidArgumentError(
            f"Variable {variable.path!r} has no value yet. Build its model first."
        )
    if is_local(variable):
        return tuple(strategy.drivers.run.local_values(variable))
    value = raw_value(variable)
    devices = strategy.placement.replicas
    moved = [strategy.engine.to_device(value, device) for device in devices]
    return tuple(keras.ops.copy(keras.ops.stop_gradient(tensor)) for tensor in moved)


def check_equal_shapes(
    strategy: StrategyCore, args: Sequence[Any], kwargs: Sequence[Any]
) -> None:
    """Checks that all replicas, also of other workers, get arrays of equal shapes.

    Args:
        strategy: the strategy.
        args: for each local replica a tuple of structures.
        kwargs: for each local replica a dict of structures.

    Raises:
        ValueError: if they do not.
    """
    found = [
        [list(leaf.shape) for leaf in flatten(list(own)) if hasattr(leaf, "shape")]
        for own in zip(args, kwargs, strict=True)
    ]
    if strategy.other_workers is not None:
        group = strategy.other_workers.group
        every = group.gather_values("the shapes of arguments of `run`", found)
        found = [shapes for each in every for shapes in each]
    if any(shapes != found[0] for shapes in found):
        raise InvalidArgumentError(
            "`run` was called with `experimental_enable_dynamic_batch_size=False`, "
            "which needs arguments of the same shapes on all replicas. Found, by "
            f"replica: {found}. Use batches that divide evenly, or omit the option."
        )
