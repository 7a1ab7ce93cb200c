"""Updates of sharded variables and their slots, shard by shard on its device."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_strategies.engines.tensorflow.sharding.shard_gradients import parts_of
from keras_strategies.engines.tensorflow.sharding.variables_in_shards import (
    VariableInShards,
    on_shard,
)
from keras_strategies.keras_compat.optimizers.optimizer_parts import (
    trained_variables,
    updating_by,
)
from keras_strategies.keras_compat.strategy_attribute import strategy_of
from keras_strategies.keras_compat.variables.values import raw_value

#: Each entry of a variable and its slots is updated from those at its place.
_ELEMENTWISE = frozenset(
    kind.update_step
    for kind in (
        keras.optimizers.SGD,
        keras.optimizers.RMSprop,
        keras.optimizers.Adam,
        keras.optimizers.Adadelta,
        keras.optimizers.Adagrad,
        keras.optimizers.Adamax,
        keras.optimizers.Nadam,
        keras.optimizers.Ftrl,
        keras.optimizers.Lion,
    )
)


def updating_by_shards(optimizer: Any) -> contextlib.AbstractContextManager[None]:
    """A context in which an optimizer updates shards on their devices.

    An optimizer of another kind, as one that uses the norm of a variable, gets the
    gathered values of a variable and its slots, and assigns them.
    """
    is_elementwise = type(optimizer).update_step in _ELEMENTWISE
    update = functools.partial(_update, optimizer) if is_elementwise else None
    return updating_by(optimizer, update, _decay)


def by_shards(optimizer: Any, apply: Callable[..., Any]) -> Callable[..., Any]:
    """`optimizer.apply`, in which shards are updated on their devices."""

    @functools.wraps(apply)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with updating_by_shards(optimizer):
            return apply(*args, **kwargs)

    return wrapped


def _update(
    optimizer: Any,
    update: Callable[..., None],
    gradient: Any,
    variable: Any,
    learning_rate: Any,
) -> None:
    if not isinstance(variable, VariableInShards):
        update(gradient, variable, learning_rate)
        return
    if strategy_of(optimizer.iterations) is None:
        _adopt(optimizer)
    parts = parts_of(variable, gradient)
    for number in variable.shards:
        with _updating(variable, number):
            update(parts[number], variable, learning_rate)


def _decay(decay: Callable[..., None], variables: Sequence[Any]) -> None:
    for variable in variables:
        raw = raw_value(variable)
        if not isinstance(raw, VariableInShards):
            decay([variable])
            continue
        for number in raw.shards:
            with _updating(raw, number):
                decay([variable])


@contextlib.contextmanager
def _updating(variable: VariableInShards, number: int) -> Iterator[None]:
    with on_shard(number), tf.device(variable.shards[number].device):
        yield


def _adopt(optimizer: Any) -> None:
    """Shards slots that were made outside of the scope."""
    for variable in trained_variables(optimizer):
        strategy = strategy_of(variable)
        if strategy is not None:
            strategy.drivers.fit.adopt(optimizer.variables)
            return
