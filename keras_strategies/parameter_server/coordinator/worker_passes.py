"""Passes over input that workers read: pipelines of a `DatasetCreator`.

The coordinator schedules steps without rows. A step is assigned to a worker with the
next batch of the worker's pipeline, and returns to the queue if there is none.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

from keras_strategies.keras_compat.models.input_adapters import ReadBatch
from keras_strategies.parameter_server.coordinator.pipelines import Pipelines
from keras_strategies.parameter_server.coordinator.remote_functions import (
    ModelDefinition,
    RemoteFunctions,
)
from keras_strategies.parameter_server.coordinator.remote_values import (
    PerWorkerValues,
    RemoteValue,
)
from keras_strategies.parameter_server.coordinator.scheduled_steps import ScheduledSteps
from keras_strategies.parameter_server.coordinator.step_sources import (
    SourceStep,
    StepSource,
)
from keras_strategies.parameter_server.worker.pipeline_reader import (
    PipelineReader,
    first_batch,
)
from keras_strategies.training.model_input import DatasetFunction


class WorkerInput:
    """Input of a method of a model that workers read.

    Args:
        function: the pipelines' `DatasetFunction`.
        class_weight: dict, as for `fit`.
        functions: sends the function to workers.
        count: int, the number of pipelines.
    """

    def __init__(
        self,
        function: DatasetFunction,
        class_weight: dict[int, float] | None,
        functions: RemoteFunctions,
        count: int,
    ):
        self._function = function
        self._class_weight = class_weight
        self._functions = functions
        self._count = count
        self._passes = itertools.count()
        self._readers: PerWorkerValues | None = None
        #: Returns the step function of the method; None before it is made.
        self.step_function: Callable[[], ScheduledSteps | None] = lambda: None

    def begin(self, per_step: int, per_epoch: int | None) -> WorkerPass:
        """A pass; see `StepSource`."""
        # A pass for each epoch ends; another one may be without end.
        is_exact = per_epoch is None
        if self._readers is None:
            reader = (self._function, self._count, self._class_weight, is_exact)
            make = functools.partial(PipelineReader, *reader)
            self._readers = self._functions.add_value(make)
        return WorkerPass(self, self._readers, per_step, per_epoch)

    def pipelines(self, per_step: int, is_exact: bool) -> Pipelines:
        """The pipelines of the next pass."""
        assert self._readers is not None, "a pass has begun"
        reader = self._readers.reference.number
        return Pipelines(reader, next(self._passes), self._count, per_step, is_exact)

    @functools.cached_property
    def first_batch(self) -> Any:
        """The first batch, read by a worker; None if there is none."""
        return self._functions.schedule(first_batch, (self._readers,), {}).fetch()


class WorkerPass(StepSource):
    """A pass over input that workers read.

    Args:
        source: the input.
        readers: its `PipelineReader`s.
        per_step: see `StepSource`.
        per_epoch: see `StepSource`.
    """

    def __init__(
        self,
        source: WorkerInput,
        readers: PerWorkerValues,
        per_step: int,
        per_epoch: int | None,
    ):
        super().__init__(per_step, per_epoch)
        self.input = source
        self.readers = readers

    @functools.cached_property
    def pipelines(self) -> Pipelines:
        """The pipelines, from the first step on: Keras begins passes that it drops."""
        return self.input.pipelines(self._per_step, self.per_epoch is None)

    def _read(self) -> SourceStep:
        return _PipelineStep(self, self._per_step)


class _PipelineStep(SourceStep):
    """A step with batches that the worker reads which it is assigned to.

    Args:
        source: the pass.
        count: int, the number of batches.
    """

    source: WorkerPass

    def __init__(self, source: WorkerPass, count: int):
        super().__init__(source)
        self._count = count

    def reads(self) -> list[ReadBatch]:
        steps = self.source.input.step_function()
        if steps is not None:
            # Only its result shows whether there is a batch.
            steps.run(self)
        return [_UnreadBatch(self) for _ in range(self._count)]

    def first_batch(self) -> Any:
        return self.source.input.first_batch

    def schedule(
        self, functions: RemoteFunctions, definition: ModelDefinition
    ) -> RemoteValue:
        source = self.source
        return functions.schedule_steps(
            definition, [], source.pipelines, source.readers
        )


class _UnreadBatch(ReadBatch):
    """A batch that a worker reads; a model is built from the first one of the input.

    Args:
        step: the step that uses it.
    """

    def __init__(self, step: _PipelineStep):
        self.step = step

    @property
    def batch(self) -> Any:
        return self.step.first_batch()
