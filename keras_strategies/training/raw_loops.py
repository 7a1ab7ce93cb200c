"""Calls of models outside of `fit` and `run`, which train on one device."""

from __future__ import annotations

from typing import Any

import keras

from keras_strategies.engines import get_engine
from keras_strategies.keras_compat.state_scope import StateScope
from keras_strategies.keras_compat.strategy_attribute import strategy_of
from keras_strategies.keras_compat.thread_state import current_stateless_scope
from keras_strategies.runtime import context
from keras_strategies.user_warnings import warn_user

_WARNED = "_has_warned_of_raw_loop"


def warn_of_raw_call(
    model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any
) -> None:
    """Warns, once for a strategy, of a training call that no replica makes.

    Args:
        model: a model of a strategy; none of its methods, such as `fit`, is running.
        args, kwargs: the arguments of the call.
        outputs: what it has returned.
    """
    strategy = strategy_of(model)
    if (
        context.current_replica() is not None
        or strategy.num_replicas_in_sync < 2
        or strategy.placement.mesh is not None  # XLA or DTensor shards the call.
        or strategy.drivers.servers is not None
        or getattr(strategy, _WARNED, False)
        or kwargs.get("training") is False
        or not _computes(args, kwargs)
    ):
        return
    name = model.name
    if kwargs.get("training"):
        _warn(strategy, name)
    else:
        leaves = keras.tree.flatten(outputs)
        get_engine().when_differentiated(leaves, lambda: _warn(strategy, name))


def _warn(strategy: Any, name: str) -> None:
    if getattr(strategy, _WARNED, False):
        return
    setattr(strategy, _WARNED, True)
    workers = "" if strategy.workers is None else " by each worker for itself"
    warn_user(
        f"Model {name!r} was called for training outside of `fit` and "
        f"`strategy.run`. {strategy!r} has {strategy.num_replicas_in_sync} replicas, "
        f"but a call in a loop of your own is computed{workers} on one device. Pass a "
        "function with the call, its gradients and `optimizer.apply` to "
        "`strategy.run`, or override `train_step` and call `fit`. If the call does not "
        "train the model, pass `training=False` to it."
    )


def _computes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call computes outputs, and not their shapes for Keras."""
    scope = current_stateless_scope()
    if scope is not None and not isinstance(scope, StateScope):
        return False
    leaves = keras.tree.flatten((args, kwargs))
    return not any(isinstance(leaf, keras.KerasTensor) for leaf in leaves)
