"""Hooks of Keras models under `ParameterServerStrategy`."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

from keras_strategies.keras_compat import patching
from keras_strategies.keras_compat.models.input_adapters import read_through
from keras_strategies.keras_compat.variables.hosted_variables import host_variable
from keras_strategies.parameter_server.coordinator.remote_functions import (
    RemoteFunctions,
)
from keras_strategies.parameter_server.coordinator.scheduled_steps import (
    ReadAhead,
    ScheduledSteps,
)
from keras_strategies.parameter_server.coordinator.scheduler import Scheduler
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
from keras_strategies.training.progress_bar import WorkerProgress, with_progress

#: The step function of a method, by the first word of its name.
_KINDS = {
    "fit": "train",
    "train": "train",
    "evaluate": "test",
    "test": "test",
    "predict": "predict",
}


class ParameterServerTrainer(FitDriver, ParameterServerDriver):
    """Driver of models on the coordinator: variables on servers, steps on workers.

    Args:
        placement: the placement of the strategy.
        registry: the variables of the strategy.
        functions: sends models to workers and schedules their steps.
        scheduler: has the states of workers.
    """

    def __init__(
        self,
        placement: Placement,
        registry: VariableRegistry,
        functions: RemoteFunctions,
        scheduler: Scheduler,
    ):
        super().__init__(placement)
        self._registry = registry
        self._functions = functions
        self._scheduler = scheduler

    @property
    def is_synchronous(self) -> bool:
        return self._scheduler.max_staleness == 0

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        patching.install("parameter servers")
        parameter_server_engine().install()
        return parameter_server_engine().on_cpu()

    def finish_steps(self) -> None:
        self._scheduler.tasks.wait_until_done()

    def before_init(self, variable: Any) -> None:
        host_variable(variable, self._registry)

    def call(self, model: Any, name: str, original: Any, bound: Any) -> Any:
        if name == "compile":
            return original(*bound.args, **bound.kwargs)
        kind = _KINDS[name.split("_")[0]]
        setattr(model, f"{kind}_function", None)
        if not name.endswith("on_batch"):
            arguments = bound.arguments
            arguments["callbacks"] = self._with_progress(
                arguments.get("callbacks"), arguments.get("verbose", "auto")
            )
        try:
            result = original(*bound.args, **bound.kwargs)
            self.reads_results(model)
        except BaseException:
            self._scheduler.abandon()
            raise
        finally:
            setattr(model, f"{kind}_function", None)
        return result

    def _with_progress(self, callbacks: Any, verbose: Any) -> Any:
        scheduler = self._scheduler
        bar = WorkerProgress(
            lambda: sum(w.is_alive for w in list(scheduler.workers.values())),
            lambda: len(scheduler.workers),
        )
        return with_progress(callbacks, verbose, bar)

    def step_function(self, model: Any, kind: str, make: Callable[[], Any]) -> None:
        step = ScheduledSteps(model, kind, self._functions, self._scheduler)
        setattr(model, f"{kind}_function", step)

    def input_made(self, epochs: Any) -> None:
        per_step, per_epoch = epochs.steps_per_execution, epochs.steps_per_epoch
        read_through(epochs, lambda read: ReadAhead(read, per_step, per_epoch))

    def reads_results(self, model: Any) -> None:
        for kind in set(_KINDS.values()):
            step = getattr(model, f"{kind}_function")
            if isinstance(step, ScheduledSteps):
                step.finish()

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
