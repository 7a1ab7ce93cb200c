"""What is particular to Keras on TensorFlow."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

from keras_strategies.keras_compat.patching import base_trainer, is_patched, replace


def hook_tensorflow(
    on_replica: Callable[[], bool],
    has_several_devices: Callable[[Any], bool],
    initialize: Callable[[Any, Callable[[Any], None], Any], None],
    outside_replicas: Callable[[], contextlib.AbstractContextManager[None]],
    in_strategy: Callable[[], bool],
) -> None:
    """Tells Keras what it cannot see of replicas; later calls do nothing.

    Args:
        on_replica: whether code runs on one of several replicas.
        has_several_devices: whether a model is trained on several devices.
        initialize: `initialize(variable, original, value)`, called instead of
            `original(value)`, which makes the `tf.Variable` of a variable.
        outside_replicas: gives the context in which TensorFlow's default strategy is
            the current one.
        in_strategy: whether one of our strategies is current.

    Keras 3.15: `scale_loss_for_distribution` and its inverse divide by the number
    of replicas in a `tf.distribute` strategy; where `on_replica()`, losses are of
    the replica's rows already. `Trainer._resolve_auto_jit_compile` chooses XLA on
    accelerators, which cannot compile a program for several of them.
    `Variable._initialize` makes the `tf.Variable`, at once or later.
    `TFOptimizer.__init__` takes the current `tf.distribute` strategy as the one of its
    slots. `TFOptimizer._all_reduce_sum_gradients` reduces over the replicas of
    `tf.distribute`; with its default strategy that changes nothing and registers a
    gradient function that holds the graph until the process ends.
    """
    import tensorflow as tf
    from keras.src.backend import Variable
    from keras.src.backend.tensorflow.optimizer import (
        TFOptimizer,
        filter_empty_gradients,
    )
    from keras.src.losses import loss

    Trainer = base_trainer()
    owner = next(base for base in Variable.__mro__ if "_initialize" in vars(base))

    def wrap_scale(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def scale(value: Any) -> Any:
            return value if on_replica() else original(value)

        return scale

    def wrap_resolve(original: Callable[..., bool]) -> Callable[..., bool]:
        @functools.wraps(original)
        def _resolve_auto_jit_compile(self: Any) -> bool:
            return not has_several_devices(self) and original(self)

        return _resolve_auto_jit_compile

    def wrap_initialize(original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def _initialize(self: Any, value: Any) -> None:
            initialize(self, functools.partial(original, self), value)

        return _initialize

    def wrap_optimizer(original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            if not on_replica():
                original(self, *args, **kwargs)
                return
            with outside_replicas():
                original(self, *args, **kwargs)

        return __init__

    def wrap_reduce(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def _all_reduce_sum_gradients(self: Any, grads_and_vars: Any) -> Any:
            if not in_strategy() or tf.distribute.has_strategy():
                return original(self, grads_and_vars)
            grads_and_vars = list(grads_and_vars)
            filter_empty_gradients(grads_and_vars)  # Its errors and warnings.
            return grads_and_vars

        return _all_reduce_sum_gradients

    if not is_patched(loss):
        replace(TFOptimizer, "_all_reduce_sum_gradients", wrap_reduce)
        replace(TFOptimizer, "__init__", wrap_optimizer)
        replace(owner, "_initialize", wrap_initialize)
        replace(loss, "scale_loss_for_distribution", wrap_scale)
        replace(loss, "unscale_loss_for_distribution", wrap_scale)
        replace(Trainer, "_resolve_auto_jit_compile", wrap_resolve)


def is_in_optimizer() -> bool:
    """Whether an optimizer makes the variables that are being made.

    Keras 3.15: the global attribute "name_scope_stack"; optimizers make variables in
    `name_scope(..., caller=self)`.
    """
    from keras.src.backend.common import global_state
    from keras.src.optimizers.base_optimizer import BaseOptimizer

    scopes = global_state.get_global_attribute("name_scope_stack") or []
    return any(isinstance(scope.caller, BaseOptimizer) for scope in scopes)


def holds_tf_variables(layer: Any) -> bool:
    """Whether a layer holds variables or modules of TensorFlow, not of Keras.

    Keras 3.15: `Layer._flatten_layers`; Keras's own variables are `keras.Variable`.
    """
    import tensorflow as tf

    def is_foreign(value: Any) -> bool:
        if isinstance(value, (list, tuple)):
            return any(is_foreign(item) for item in value)
        return isinstance(value, (tf.Variable, tf.Module))

    return any(
        is_foreign(value)
        for sublayer in layer._flatten_layers()
        for value in vars(sublayer).values()
    )
