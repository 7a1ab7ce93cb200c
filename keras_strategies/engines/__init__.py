"""The engines below: one folder per Keras backend, behind `Engine`."""

from __future__ import annotations

import functools

from keras_strategies.errors import InvalidArgumentError
from keras_strategies.runtime.engine import Engine

_BACKENDS = ("jax", "torch", "tensorflow")


def backend_name() -> str:
    """The name of the backend that Keras runs on."""
    import keras

    return str(keras.backend.backend())


def get_engine() -> Engine:
    """The engine that belongs to Keras's backend, imported when first asked for."""
    return _load(backend_name())


@functools.cache
def _load(name: str) -> Engine:
    if name == "jax":
        from keras_strategies.engines.jax.engine import JaxEngine

        return JaxEngine()
    if name == "torch":
        from keras_strategies.engines.torch.engine import TorchEngine

        return TorchEngine()
    if name == "tensorflow":
        from keras_strategies.engines.tensorflow.engine import TensorFlowEngine

        return TensorFlowEngine()
    raise unknown_backend(name)


def unknown_backend(name: str) -> InvalidArgumentError:
    """The error for a Keras backend without strategies."""
    return InvalidArgumentError(
        f"Keras uses the backend {name!r}, which keras_strategies does not support. "
        "Set the environment variable KERAS_BACKEND to one of "
        f"{', '.join(_BACKENDS)} before Keras is imported."
    )
