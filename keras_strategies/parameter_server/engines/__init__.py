"""Step programs and optimizer updates on each Keras backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

from keras_strategies.engines import backend_name, unknown_backend

if TYPE_CHECKING:
    from keras_strategies.parameter_server.engines.engine_interface import (
        ParameterServerEngine,
    )


def get_engine() -> ParameterServerEngine:
    """The parameter-server engine of Keras's backend, imported when first used."""
    name = backend_name()
    if name == "jax":
        from keras_strategies.parameter_server.engines import jax_engine

        return jax_engine.ENGINE
    if name == "torch":
        from keras_strategies.parameter_server.engines import torch_engine

        return torch_engine.ENGINE
    if name == "tensorflow":
        from keras_strategies.parameter_server.engines import tensorflow_engine

        return tensorflow_engine.ENGINE
    raise unknown_backend(name)
