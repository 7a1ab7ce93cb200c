"""Engines: one folder for each Keras backend, with a subclass of `Engine`."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from typing import Any

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
    engine: Engine = for_backend(ENGINES)
    return engine


def tf_data_pipelines() -> Any:
    """The functions of `tf.data` pipelines, which models on every backend may read."""
    from keras_strategies.engines.tensorflow import input_pipelines

    return input_pipelines


def for_backend(classes: Mapping[str, str]) -> Any:
    """The singleton of the class for Keras's backend, imported at its first use.

    Args:
        classes: dict from the name of a backend to `"module:class"`.

    Raises:
        ValueError: if Keras uses a backend without strategies.
    """
    name = backend_name()
    if name not in classes:
        raise InvalidArgumentError(
            f"Keras uses the backend {name!r}, which keras_strategies does not "
            "support. Set the environment variable KERAS_BACKEND to one of "
            f"{', '.join(classes)} before Keras is imported."
        )
    return _load(classes[name])


@functools.cache
def _load(path: str) -> Any:
    module, _, kind = path.partition(":")
    return getattr(importlib.import_module(module), kind)()
