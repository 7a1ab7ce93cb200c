"""The engines below: one folder per Keras backend, behind `Engine`."""

from __future__ import annotations

import functools
import importlib

from keras_strategies.errors import InvalidArgumentError
from keras_strategies.runtime.engine import Engine

#: The module and class of the engine of each Keras backend.
ENGINES = {
    "jax": "keras_strategies.engines.jax.engine:JaxEngine",
    "torch": "keras_strategies.engines.torch.engine:TorchEngine",
    "tensorflow": "keras_strategies.engines.tensorflow.engine:TensorFlowEngine",
}


def backend_name() -> str:
    """The name of the backend that Keras runs on."""
    import keras

    return str(keras.backend.backend())


def get_engine() -> Engine:
    """The engine of Keras's backend, imported at its first use."""
    return _load(backend_name())


@functools.cache
def _load(name: str) -> Engine:
    if name not in ENGINES:
        raise unknown_backend(name)
    module, _, kind = ENGINES[name].partition(":")
    engine: Engine = getattr(importlib.import_module(module), kind)()
    return engine


def unknown_backend(name: str) -> InvalidArgumentError:
    """The error for a Keras backend without strategies."""
    return InvalidArgumentError(
        f"Keras uses the backend {name!r}, which keras_strategies does not support. "
        "Set the environment variable KERAS_BACKEND to one of "
        f"{', '.join(ENGINES)} before Keras is imported."
    )
