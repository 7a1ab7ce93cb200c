"""Steps of Keras's training loops on the workers of a parameter server cluster.

Keras's loop calls a step function. It schedules the step and those of later batches,
and returns the step's result when a worker has finished it. Each batch is used exactly
once by any worker; callbacks run on the coordinator, in the order of the steps.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import keras

from keras_strategies.keras_compat.models.building import (
    empty_input,
    is_unbuilt,
    symbolic_build,
)
from keras_strategies.keras_compat.models.input_adapters import ReadBatch
from keras_strategies.parameter_server.coordinator.remote_functions import (
    ModelDefinition,
    RemoteFunctions,
)
from keras_strategies.parameter_server.coordinator.remote_values import RemoteValue
from keras_strategies.parameter_server.coordinator.scheduler import Scheduler
from keras_strategies.parameter_server.coordinator.step_sources import (
    SourceStep,
    StepBatches,
    StepSource,
)
from keras_strategies.parameter_server.coordinator.task_queue import END_OF_INPUT

#: Tasks per worker that are scheduled ahead of the loop.
_WINDOW = 3
#: The same, while the loop waits for a slow worker.
_FAR_WINDOW = 64


class ScheduledSteps:
    """The step function of one method of a model.

    Args:
        model: the model.
        kind: str, `"train"`, `"test"` or `"predict"`.
        functions: sends models to workers and schedules their steps.
        scheduler: has the states of workers.
    """

    def __init__(
        self, model: Any, kind: str, functions: RemoteFunctions, scheduler: Scheduler
    ):
        self._model = weakref.ref(model)
        self._kind = kind
        self._functions = functions
        self._scheduler = scheduler
        # As in Keras, the layers at the start of the method count.
        self._definition: ModelDefinition | None = None
        self._in_flight: dict[SourceStep, RemoteValue] = {}
        self._source: StepSource | None = None
        # Steps of the source.
        self._scheduled = 0
        # Results of steps that Keras's loop has not requested.
        self._results: dict[SourceStep, Any] = {}

    def __call__(self, *arguments: Any) -> Any:
        """Keras's step function.

        Args:
            arguments: an iterable of batches; on JAX a state before it.
        """
        *state, batches = arguments
        model: Any = self._model()
        taken = list(itertools.islice(batches, model.steps_per_execution))
        if not taken:
            if self._definition is None and is_unbuilt(model):
                raise empty_input()
            raise StopIteration
        is_read = isinstance(taken[0], ReadBatch)
        step = taken[0].step if is_read else StepBatches(taken)
        result = self._results.pop(step) if step in self._results else self._run(step)
        return (result, *state) if state else result

    def finish(self) -> None:
        """Waits for the steps in flight."""
        while self._in_flight:
            self._fetch(next(iter(self._in_flight)))

    def run(self, step: SourceStep) -> None:
        """Runs a step before Keras's loop requests its result.

        Raises:
            StopIteration: at the end of input that workers read.
        """
        self._results[step] = self._run(step)

    def _run(self, step: SourceStep) -> Any:
        if self._source is not step.source:
            self._source, self._scheduled = step.source, 0
        if step not in self._in_flight:
            self._schedule(step)
        while self._has_room(self._in_flight[step]):
            ahead = self._step_ahead()
            if ahead is None:
                break
            self._schedule(ahead)
        result = self._fetch(step)
        while result is END_OF_INPUT and self._in_flight:
            # Other workers had more batches for later steps.
            result = self._fetch(next(iter(self._in_flight)))
        if result is END_OF_INPUT:
            raise StopIteration
        return result

    def _step_ahead(self) -> SourceStep | None:
        source = self._source
        if source is None:
            return None
        is_end = source.per_epoch and self._scheduled % source.per_epoch == 0
        return None if is_end else source.step_ahead()

    def _has_room(self, first: RemoteValue) -> bool:
        """Whether another step is scheduled before the first one is waited for."""
        scheduler = self._scheduler
        window = _WINDOW * len(scheduler.workers)
        far = _FAR_WINDOW * len(scheduler.workers)
        if scheduler.max_staleness is not None:
            window = far = min(window, scheduler.max_staleness + 1)
        count = len(self._in_flight)
        if count < window:
            return True
        # A slow worker runs the first task; the others continue.
        return count < far and not scheduler.tasks.wait_for_room(first.is_done)

    def _schedule(self, step: SourceStep) -> None:
        if self._definition is None:
            model: Any = self._model()
            if self._kind != "predict" and is_unbuilt(model):
                first = step.first_batch()
                if first is None:
                    raise empty_input()
                symbolic_build(model, first)
            self._definition = self._functions.model_definition(model, self._kind)
        self._in_flight[step] = step.schedule(self._functions, self._definition)
        self._scheduled += 1

    def _fetch(self, step: SourceStep) -> Any:
        value = self._in_flight[step]
        if self._kind == "predict":
            # Keras converts the outputs of all batches to arrays.
            result = keras.tree.map_structure(_concatenated, *value.get())
        else:
            result = value.fetch()
        del self._in_flight[step]
        self._scheduler.tasks.emit_warnings()
        return result


def _concatenated(*parts: Any) -> Any:
    return parts[0] if len(parts) == 1 else keras.ops.concatenate(parts)
