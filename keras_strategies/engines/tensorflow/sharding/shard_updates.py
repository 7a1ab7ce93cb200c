"""Updates of sharded variables and their slots, shard by shard on its device."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_strategies.engines.tensorflow.sharding.shard_gradients import (
    GradientInShards,
    parts_of,
)
from keras_strategies.engines.tensorflow.sharding.variables_in_shards import (
    VariableInShards,
    on_shard,
)
from keras_strategies.keras_compat.optimizers.optimizer_parts import (
    step_variable,
    trained_variables,
    updates_entries,
    updating_by,
)
from keras_strategies.keras_compat.strategy_attribute import strategy_of
from keras_strategies.keras_compat.variables.values import raw_value


def updating_by_shards(optimizer: Any) -> contextlib.AbstractContextManager[None]:
    """A context in which an optimizer updates shards on their devices.

    So do the clipping of gradients and weight decay. Accumulation and moving averages,
    and an optimizer that uses more than entries, get the gathered values of a variable
    and its slots, and assign them.
    """
    methods: dict[str, Callable[..., Any]] = {
        "update_step": _update_of(optimizer),
        "_apply_weight_decay": _decay,
        "_clip_gradients": functools.partial(_clip, optimizer),
    }
    if not optimizer.gradient_accumulation_steps:
        methods["_backend_apply_gradients"] = _apply
    # A class of its own has methods of its own, which get variables as they are.
    of_keras = {
        name: method
        for name, method in methods.items()
        if name == "update_step"
        or getattr(type(optimizer), name, None) is getattr(keras.Optimizer, name)
    }
    return updating_by(optimizer, of_keras)


def _update_of(optimizer: Any) -> Callable[..., None]:
    if updates_entries(optimizer):
        return functools.partial(_update, optimizer)
    return _update_gathered


def by_shards(optimizer: Any, apply: Callable[..., Any]) -> Callable[..., Any]:
    """`optimizer.apply`, in which shards are updated on their devices."""

    @functools.wraps(apply)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with updating_by_shards(optimizer):
            return apply(*args, **kwargs)

    return wrapped


def _apply(
    apply: Callable[..., None], gradients: Sequence[Any], variables: Sequence[Any]
) -> None:
    pairs = zip(variables, gradients, strict=True)
    apply([GradientInShards.of(*pair) for pair in pairs], variables)


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
    _adopt(optimizer)
    parts = _parts(variable, gradient)
    for number in variable.shards:
        with _updating(variable, number):
            update(parts[number], variable, learning_rate)


def _update_gathered(
    update: Callable[..., None], gradient: Any, variable: Any, learning_rate: Any
) -> None:
    if isinstance(gradient, GradientInShards):
        gradient = tf.convert_to_tensor(gradient)
    update(gradient, variable, learning_rate)


def _parts(variable: VariableInShards, gradient: Any) -> Sequence[Any]:
    is_in_shards = isinstance(gradient, GradientInShards)
    return gradient.parts if is_in_shards else parts_of(variable, gradient)


def _clip(
    optimizer: Any, clip: Callable[..., list[Any]], gradients: Sequence[Any]
) -> list[Any]:
    """Clipping by the norms of all shards (`_clip_gradients` of Keras 3.15)."""
    limit = optimizer.clipnorm or optimizer.global_clipnorm or 0
    if limit > 0 and not optimizer.clipnorm:
        squares = [
            g.squared_norm()
            if isinstance(g, GradientInShards)
            else tf.reduce_sum(tf.square(tf.convert_to_tensor(g)))
            for g in gradients
        ]
        scale = _scale(tf.add_n(squares), limit)
        return [g * scale for g in gradients]

    def clipped(gradient: Any) -> Any:
        if not isinstance(gradient, GradientInShards):
            return clip([gradient])[0]
        if limit > 0:
            return gradient * _scale(gradient.squared_norm(), limit)
        return gradient.map(lambda part: clip([part])[0])

    return [clipped(gradient) for gradient in gradients]


def _scale(squared_norm: Any, limit: float) -> Any:
    """The factor by which gradients are multiplied; NaN for one that is not finite."""
    norm = tf.sqrt(squared_norm)
    return limit / tf.maximum(norm, limit) + (norm - norm)


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
    if strategy_of(step_variable(optimizer)) is not None:
        return
    for variable in trained_variables(optimizer):
        strategy = strategy_of(variable)
        if strategy is not None:
            strategy.drivers.fit.adopt(optimizer.variables)
            return
