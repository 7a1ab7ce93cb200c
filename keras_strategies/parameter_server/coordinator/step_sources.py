"""Sources of steps: passes over batches that can be read further than they yield."""

from __future__ import annotations

import abc
import itertools
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from keras_strategies.keras_compat.models.input_adapters import ReadBatch
from keras_strategies.parameter_server.coordinator.remote_functions import (
    ModelDefinition,
    RemoteFunctions,
)
from keras_strategies.parameter_server.coordinator.remote_values import RemoteValue
from keras_strategies.parameter_server.wire.batch_references import host_batch
from keras_strategies.runtime.row_splits import check_batch


class SourceStep(abc.ABC):
    """The batches of one step: `steps_per_execution` or, at the end, fewer.

    Args:
        source: the pass that they belong to; None for those of `*_on_batch`.
    """

    def __init__(self, source: StepSource | None):
        self.source = source

    @abc.abstractmethod
    def reads(self) -> list[ReadBatch]:
        """The batches for Keras's loop, when it requests the first one.

        Raises:
            StopIteration: if there is none.
        """

    @abc.abstractmethod
    def first_batch(self) -> Any:
        """A batch to build a model from; None for an empty input."""

    @abc.abstractmethod
    def schedule(
        self, functions: RemoteFunctions, definition: ModelDefinition
    ) -> RemoteValue:
        """Schedules the step of a model."""


class StepBatches(SourceStep):
    """Batches that the coordinator has read.

    Args:
        batches: the batches, as the user gives them.
        source: see `SourceStep`.
    """

    def __init__(self, batches: Iterable[Any], source: StepSource | None = None):
        super().__init__(source)
        self.batches = [host_batch(batch) for batch in batches]
        for batch in self.batches:
            check_batch(batch)

    def reads(self) -> list[ReadBatch]:
        return [ReadBatch(batch, self) for batch in self.batches]

    def first_batch(self) -> Any:
        return self.batches[0]

    def schedule(
        self, functions: RemoteFunctions, definition: ModelDefinition
    ) -> RemoteValue:
        return functions.schedule_steps(definition, self.batches)


class StepSource(abc.ABC):
    """A pass over batches that can be read further than it yields.

    Args:
        per_step: int, batches of a step.
        per_epoch: int, batches of an epoch; None for all.
    """

    def __init__(self, per_step: int, per_epoch: int | None):
        self._per_step = per_step
        #: Steps of an epoch; None for all.
        self.per_epoch = per_epoch and -(-per_epoch // per_step)
        self._ahead: deque[SourceStep] = deque()
        self._yielded: Iterator[ReadBatch] = iter(())

    def __iter__(self) -> Iterator[ReadBatch]:
        return self

    def __next__(self) -> ReadBatch:
        batch = next(self._yielded, None)
        if batch is not None:
            return batch
        step = self._ahead.popleft() if self._ahead else self._read()
        if step is None:
            raise StopIteration
        self._yielded = iter(step.reads())
        return next(self._yielded)

    def step_ahead(self) -> SourceStep | None:
        """Reads the batches of one more step; None at the end of the input."""
        step = self._read()
        if step is not None:
            self._ahead.append(step)
        return step

    @abc.abstractmethod
    def _read(self) -> SourceStep | None:
        """The next step; None at the end of the input."""


class ReadAhead(StepSource):
    """A pass over batches that the coordinator reads.

    Args:
        batches: iterator of batches.
        per_step: see `StepSource`.
        per_epoch: see `StepSource`.
    """

    def __init__(self, batches: Iterator[Any], per_step: int, per_epoch: int | None):
        super().__init__(per_step, per_epoch)
        self._batches = batches

    def _read(self) -> SourceStep | None:
        step = StepBatches(itertools.islice(self._batches, self._per_step), self)
        return step if step.batches else None
