"""Step programs and optimizer updates on each Keras backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

from keras_strategies.engines import for_backend

if TYPE_CHECKING:
    from keras_strategies.parameter_server.engines.engine_interface import (
        ParameterServerEngine,
    )

#: The module and class of the parameter-server engine of each Keras backend.
ENGINES = {
    "jax": "keras_strategies.parameter_server.engines.jax_engine"
    ":JaxParameterServerEngine",
    "torch": "keras_strategies.parameter_server.engines.torch_engine"
    ":TorchParameterServerEngine",
    "tensorflow": "keras_strategies.parameter_server.engines.tensorflow_engine"
    ":TensorFlowParameterServerEngine",
}


def parameter_server_engine() -> ParameterServerEngine:
    """The parameter-server engine of Keras's backend, imported at its first use."""
    engine: ParameterServerEngine = for_backend(ENGINES)
    return engine
