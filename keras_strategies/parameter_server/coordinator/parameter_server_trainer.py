"""Hooks of Keras models under `ParameterServerStrategy`."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

from keras_strategies.keras_compat.variables.hosted_variables import host_variable
from keras_strategies.parameter_server.coordinator.model_training import ModelTraining
from keras_strategies.parameter_server.engines import parameter_server_engine
from keras_strategies.parameter_server.variables.dtype_sizes import bytes_per_element
from keras_strategies.parameter_server.variables.variable_registry import (
    VariableRegistry,
)
from keras_strategies.parameter_server.wire.variable_description import (
    VariableDescription,
    is_sharded,
)
from keras_strategies.runtime.drivers import FitDriver, ParameterServerDriver
from keras_strategies.runtime.placement import Placement, VariableCopy


class ParameterServerTrainer(FitDriver, ParameterServerDriver):
    """Driver of models on the coordinator: variables on servers, steps on workers.

    Args:
        placement: the placement of the strategy.
        registry: the variables of the strategy.
        training: the methods of models.
    """

    def __init__(
        self,
        placement: Placement,
        registry: VariableRegistry,
        training: ModelTraining,
    ):
        super().__init__(placement)
        self._registry = registry
        self._training = training

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        return parameter_server_engine().on_cpu()

    def finish_steps(self) -> None:
        self._training.finish_steps()

    def making(self, variable: Any) -> None:
        host_variable(variable, self._registry)

    def call(self, model: Any, name: str, original: Any, bound: Any) -> Any:
        if name == "compile":
            return original(*bound.args, **bound.kwargs)
        arguments = dict(bound.arguments)
        arguments.pop("self")
        arguments.update(arguments.pop("kwargs", {}))
        return getattr(self._training, name)(model, **arguments)

    def step_function(self, model: Any, kind: str, make: Callable[[], Any]) -> None:
        """Does nothing: steps run on workers."""

    def copies(self, variable: Any) -> list[VariableCopy]:
        description = self._registry.describe(variable)
        if description.kind == "local":
            value = self._registry.read(variable)
            return [VariableCopy("coordinator", value.nbytes, "variable", value)]
        row = _row_bytes(description)
        kind = "shard" if is_sharded(description) else "variable"
        return [
            VariableCopy(
                f"ps:{shard.server}",
                row * (shard.stop - shard.start),
                kind,
                None,
            )
            for shard in description.shards
        ]


def _row_bytes(description: VariableDescription) -> int:
    return math.prod(description.shape[1:]) * bytes_per_element(description.dtype)
