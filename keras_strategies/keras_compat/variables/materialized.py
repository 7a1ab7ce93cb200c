"""Hosted variables with ordinary values while a block runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from keras_strategies.keras_compat.thread_state import current_stateless_scope
from keras_strategies.keras_compat.variables.hosted_variables import host_of, is_hosted


@contextlib.contextmanager
def materialized(variables: Iterable[Any]) -> Iterator[None]:
    """Gives hosted variables ordinary values in this process, while the block runs.

    Assignments in the block are written back. Variables with values in this process,
    and all variables in a stateless scope, are unchanged.

    Keras 3.15: `_initialize` makes the backend's variable of a value.
    """
    import keras

    hosted: dict[int, tuple[Any, Any, Any, Any]] = {}
    arrays: dict[int, Any] = {}
    try:
        for variable in variables:
            if (
                not is_hosted(variable)
                or host_of(variable).is_local
                or variable._value is None
                or current_stateless_scope() is not None
            ):
                continue
            host = host_of(variable)
            array = arrays[id(variable)] = host.read(variable)
            hosted[id(variable)] = variable, host, type(variable), variable._value
            del variable.__dict__["_keras_strategies_host"]
            variable.__class__ = type(variable)._kind
            variable._value = None
            variable._initialize(keras.ops.convert_to_tensor(array, variable._dtype))
        yield
    finally:
        after = {key: entry[0].numpy() for key, entry in hosted.items()}
        for variable, host, kind, value in hosted.values():
            variable.__class__ = kind
            variable._value = value
            object.__setattr__(variable, "_keras_strategies_host", host)
    for key, (variable, host, _, _) in hosted.items():
        if not np.array_equal(after[key], arrays[key], equal_nan=True):
            host.write(variable, after[key])


@contextlib.contextmanager
def materialized_model(model: Any) -> Iterator[None]:
    """Gives all variables of a model ordinary values while the block runs.

    Keras 3.15 on Torch: `TorchLayer._track_variables` makes parameters of the module.
    """
    optimizer = getattr(model, "optimizer", None)
    optimizers = [] if optimizer is None else optimizer.variables
    # Metrics of `compile` are among a model's variables only once they are built.
    everything = [*model.variables, *model.metrics_variables, *optimizers]
    layers = [
        layer
        for layer in model._flatten_layers()
        if hasattr(layer, "_track_variables") and layer.built
    ]

    def track() -> None:
        for layer in layers:
            layer._track_variables()

    distinct = {id(variable): variable for variable in everything}
    try:
        with materialized(distinct.values()):
            track()
            yield
    finally:
        track()
