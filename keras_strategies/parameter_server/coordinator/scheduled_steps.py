"""Steps of Keras's training loops on the workers of a parameter server cluster.

Keras's loop calls a step function. It schedules the step and those of later batches,
and returns the step's result when a worker has finished it. Each batch is used exactly
once by any worker; callbacks run on the coordinator, in the order of the steps.
"""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import keras
import numpy as np

from keras_strategies.input.batches import as_numpy
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
from keras_strategies.parameter_server.engines.composite_tensors import is_composite
from keras_strategies.runtime.row_splits import check_batch

#: Tasks per worker that are scheduled ahead of the loop.
_WINDOW = 3
#: The same, while the loop waits for a slow worker.
_FAR_WINDOW = 64


class StepBatches:
    """The batches of one step: `steps_per_execution` or, at the end, fewer.

    Args:
        batches: the batches, as the user gives them.
        source: the pass that they were read from; None for those of `*_on_batch`.
    """

    def __init__(self, batches: Iterable[Any], source: ReadAhead | None = None):
        self.batches = [_on_host(batch) for batch in batches]
        self.source = source
        for batch in self.batches:
            check_batch(batch)


class ReadAhead:
    """A pass over batches that can be read further than it yields.

    Args:
        batches: iterator of batches.
        per_step: int, batches of a step.
        per_epoch: int, batches of an epoch; None for all.
    """

    def __init__(self, batches: Iterator[Any], per_step: int, per_epoch: int | None):
        self._batches = batches
        self._per_step = per_step
        #: Steps of an epoch; None for all.
        self.per_epoch = per_epoch and -(-per_epoch // per_step)
        self._ahead: deque[StepBatches] = deque()
        self._yielded: Iterator[ReadBatch] = iter(())

    def __iter__(self) -> Iterator[ReadBatch]:
        return self

    def __next__(self) -> ReadBatch:
        batch = next(self._yielded, None)
        if batch is not None:
            return batch
        step = self._ahead.popleft() if self._ahead else self._read()
        self._yielded = (ReadBatch(batch, step) for batch in step.batches)
        return next(self._yielded)

    def step_ahead(self) -> StepBatches | None:
        """Reads the batches of one more step; None at the end of the input."""
        step = self._read()
        if not step.batches:
            return None
        self._ahead.append(step)
        return step

    def _read(self) -> StepBatches:
        return StepBatches(itertools.islice(self._batches, self._per_step), self)


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
        self._in_flight: dict[StepBatches, RemoteValue] = {}
        self._source: ReadAhead | None = None
        # Steps of the source.
        self._scheduled = 0

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
                raise empty_input(model)
            raise StopIteration
        is_read = isinstance(taken[0], ReadBatch)
        result = self._run(taken[0].step if is_read else StepBatches(taken))
        return (result, *state) if state else result

    def finish(self) -> None:
        """Waits for the steps in flight."""
        while self._in_flight:
            self._fetch(next(iter(self._in_flight)))

    def _run(self, step: StepBatches) -> Any:
        if self._source is not step.source:
            self._source, self._scheduled = step.source, 0
        if step not in self._in_flight:
            self._schedule(step)
        while self._has_room(self._in_flight[step]):
            ahead = self._step_ahead()
            if ahead is None:
                break
            self._schedule(ahead)
        return self._fetch(step)

    def _step_ahead(self) -> StepBatches | None:
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

    def _schedule(self, step: StepBatches) -> None:
        if self._definition is None:
            model: Any = self._model()
            if self._kind != "predict" and is_unbuilt(model):
                symbolic_build(model, step.batches[0])
            self._definition = self._functions.model_definition(model, self._kind)
        self._in_flight[step] = self._functions.schedule_steps(
            self._definition, step.batches
        )
        self._scheduled += 1

    def _fetch(self, step: StepBatches) -> Any:
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


def _on_host(batch: Any) -> Any:
    """A batch of NumPy arrays and composite tensors, without trailing None."""
    parts = list(batch) if isinstance(batch, (tuple, list)) else [batch]
    while parts and parts[-1] is None:
        parts.pop()
    return tuple(
        keras.tree.map_structure(
            lambda leaf: (
                leaf
                if leaf is None or is_composite(leaf)
                else _contiguous(as_numpy(leaf))
            ),
            part,
        )
        for part in parts
    )


def _contiguous(array: Any) -> Any:
    if array.dtype == np.float64:
        # As Keras converts it.
        array = array.astype(keras.config.floatx())
    return np.ascontiguousarray(array) if array.ndim else array
