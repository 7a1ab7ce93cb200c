"""Use of Keras on TensorFlow beyond its public interface."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import keras

from keras_strategies.keras_compat import patching


class _Replicas:
    # Strategies of one replica do not call `hook_tensorflow`.
    on_replica: Callable[[], bool] = staticmethod(lambda: False)
    has_several_devices: Callable[[Any], bool]
    initialize: Callable[[Any, Callable[[Any], None], Any], None]
    outside_replicas: Callable[[], contextlib.AbstractContextManager[None]]
    in_strategy: Callable[[], bool]


def hook_tensorflow(
    on_replica: Callable[[], bool],
    has_several_devices: Callable[[Any], bool],
    initialize: Callable[[Any, Callable[[Any], None], Any], None],
    outside_replicas: Callable[[], contextlib.AbstractContextManager[None]],
    in_strategy: Callable[[], bool],
) -> None:
    """Installs the state of replicas in Keras; later calls do nothing.

    Args:
        on_replica: whether code runs on one of several replicas.
        has_several_devices: whether a model is trained on several devices.
        initialize: `initialize(variable, original, value)`, called instead of
            `original(value)`, which makes the `tf.Variable` of a variable.
        outside_replicas: returns a context in which TensorFlow's default strategy is
            the current one.
        in_strategy: whether a strategy of this package is the current one.
    """
    _Replicas.on_replica = on_replica
    _Replicas.has_several_devices = has_several_devices
    _Replicas.initialize = initialize
    _Replicas.outside_replicas = outside_replicas
    _Replicas.in_strategy = in_strategy
    patching.install("tensorflow replicas")


def is_trained_on_several_devices(model: Any) -> bool:
    """Whether steps of a model have several devices on TensorFlow."""
    if not patching.is_installed("tensorflow replicas"):
        return False
    return _Replicas.has_several_devices(model)


def step_is_traced_for_batches(steps_per_execution: int) -> bool:
    """Whether Keras traces a step for each batch's shape, not for its dataset's.

    Keras 3.15 reads batches in its program, and with several steps 3.16 does, too.
    """
    version = tuple(map(int, keras.__version__.split(".")[:2]))
    return steps_per_execution == 1 and version >= (3, 16)


def scale_loss(original: Any, value: Any) -> Any:
    return value if _Replicas.on_replica() else original(value)


def initialize(variable: Any, original: Callable[[Any], None], value: Any) -> None:
    """Makes the `tf.Variable` of a variable, which may be mirrored.

    Keras 3.15: `KerasVariable._initialize`, immediate or deferred.
    """
    if patching.is_installed("tensorflow replicas"):
        _Replicas.initialize(variable, original, value)
    else:
        original(value)


def optimizer_init(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    if not _Replicas.on_replica():
        original(self, *args, **kwargs)
        return
    with _Replicas.outside_replicas():
        original(self, *args, **kwargs)


def sum_gradients(original: Any, self: Any, grads_and_vars: Any) -> Any:
    import tensorflow as tf
    from keras.src.backend.tensorflow.optimizer import filter_empty_gradients

    if not _Replicas.in_strategy() or tf.distribute.has_strategy():
        return original(self, grads_and_vars)
    grads_and_vars = list(grads_and_vars)
    filter_empty_gradients(grads_and_vars)  # Its errors and warnings.
    return grads_and_vars


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
