"""Hooks of Keras models under `ParameterServerStrategy`."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from keras_strategies import keras_compat
from keras_strategies.parameter_server.coordinator.cluster_coordinator import (
    ClusterCoordinator,
)
from keras_strategies.parameter_server.coordinator.model_training import ModelTraining
from keras_strategies.runtime.engine import TrainerAdapter
from keras_strategies.runtime.placement import VariableCopy

if TYPE_CHECKING:
    from keras_strategies.parameter_server.parameter_server_strategy import (
        ParameterServerStrategy,
    )


class ParameterServerTrainer(TrainerAdapter):
    """Trainer adapter of the coordinator, whose variables are on servers."""

    strategy: ParameterServerStrategy

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def exporting(self, model: Any) -> contextlib.AbstractContextManager[None]:
        return keras_compat.materialized_model(model)

    def making(self, variable: Any) -> None:
        keras_compat.host_variable(variable, self.strategy.registry)

    @functools.cached_property
    def _training(self) -> ModelTraining:

        return ModelTraining(ClusterCoordinator(self.strategy))

    def call(self, model: Any, name: str, original: Any, bound: Any) -> Any:
        if name == "compile":
            return original(*bound.args, **bound.kwargs)
        arguments = dict(bound.arguments)
        arguments.pop("self")
        arguments.update(arguments.pop("kwargs", {}))
        return getattr(self._training, name)(model, **arguments)

    def step_function(
        self, model: Any, kind: str, make: Callable[[bool], Any], force: bool
    ) -> None:
        """Does nothing: steps run on workers."""

    def copies(self, variable: Any) -> list[VariableCopy]:
        description = self.strategy.registry.describe(variable)
        if description.kind == "local":
            value = self.strategy.registry.read(variable)
            return [VariableCopy("coordinator", value.nbytes, "variable", value)]
        row = _row_bytes(description)
        several = len(description.shards) > 1 and description.kind != "scalar"
        return [
            VariableCopy(
                f"ps:{shard.server}",
                row * (shard.stop - shard.start),
                "shard" if several else "variable",
                None,
            )
            for shard in description.shards
        ]


def _row_bytes(description: Any) -> int:

    from keras_strategies.parameter_server.variables.variable_partitioners import (
        bytes_per_element,
    )

    return math.prod(description.shape[1:]) * bytes_per_element(description.dtype)
