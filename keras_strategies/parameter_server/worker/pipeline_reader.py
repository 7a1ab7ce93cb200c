"""Pipelines of a `DatasetCreator` that a worker reads."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from keras_strategies.keras_compat.models.input_adapters import (
    data_adapter,
    numpy_pass,
)
from keras_strategies.parameter_server.wire.batch_references import (
    BatchReference,
    host_batch,
)
from keras_strategies.training.model_input import DatasetFunction
from keras_strategies.types import InputContext


class _Pipeline:
    """An open pipeline: one pass after the other over its dataset.

    Args:
        adapter: Keras's adapter of the dataset.
    """

    def __init__(self, adapter: Any):
        self.adapter = adapter
        self._batches: Iterator[Any] = iter(())
        #: Number of the current pass; -1 before the first one.
        self.pass_number = -1
        #: Number of batches that were read in this pass.
        self.position = 0

    def begin_pass(self, number: int) -> None:
        """Begins a pass, as Keras's loops do."""
        if self.pass_number >= 0:
            self.adapter.on_epoch_end()
        self.adapter.on_epoch_begin()
        self._batches = numpy_pass(self.adapter)
        self.pass_number = number
        self.position = 0

    def next(self) -> Any:
        """The next batch of this pass; None at its end."""
        self.position += 1
        return next(self._batches, None)

    def put_back(self, batch: Any) -> None:
        """Makes the last batch the next one again."""
        self._batches = itertools.chain([batch], self._batches)
        self.position -= 1


class PipelineReader:
    """Reads batches of pipelines by their place.

    Args:
        function: `DatasetFunction`; called for a pipeline when it is first read.
        count: int, the number of pipelines.
        class_weight: dict, as for `fit`.
        is_exact: bool, whether a batch has to be the one at its place. Otherwise it is
            the next one of the pipeline, which a new process reads from its beginning,
            and which begins again at its end where its length is known, as in Keras.
    """

    def __init__(
        self,
        function: DatasetFunction,
        count: int,
        class_weight: dict[int, float] | None,
        is_exact: bool,
    ):
        self._function = function
        self._count = count
        self._class_weight = class_weight
        self._is_exact = is_exact
        self._pipelines: dict[int, _Pipeline] = {}
        self._error: Exception | None = None

    def read(self, at: BatchReference) -> Any:
        """A batch of NumPy arrays and composite tensors; None at the end of the pass.

        Raises:
            Exception: that of the dataset, in each later call, too.
        """
        if self._error is not None:
            # An iterator that has failed would seem to have ended.
            raise self._error
        try:
            pipeline = self._pipeline(at)
            batch = pipeline.next()
            repeats = not self._is_exact and pipeline.adapter.num_batches
            if batch is None and repeats:
                pipeline.begin_pass(at.pass_number)
                batch = pipeline.next()
        except Exception as error:
            self._error = error
            raise
        return None if batch is None else host_batch(batch)

    def first(self) -> Any:
        """The first batch, to build a model from; None without one."""
        at = BatchReference(0, 0, 0, 0)
        batch = self.read(at)
        if batch is not None:
            self._pipelines[0].put_back(batch)
        return batch

    def _pipeline(self, at: BatchReference) -> _Pipeline:
        """The pipeline of a batch, which is the next one that it reads."""
        found = self._pipelines.get(at.pipeline)
        place = (at.pass_number, at.position)
        if found is None or (
            self._is_exact and (found.pass_number, found.position) > place
        ):
            found = self._pipelines[at.pipeline] = self._opened(at.pipeline)
        if found.pass_number < at.pass_number:
            begin = found.pass_number + 1 if self._is_exact else at.pass_number
            for number in range(begin, at.pass_number):
                # The order of a pass may follow from the number of those before it,
                # which some datasets count when the first batch is read.
                found.begin_pass(number)
                found.next()
            found.begin_pass(at.pass_number)
        while self._is_exact and found.position < at.position:
            found.next()
        return found

    def _opened(self, pipeline: int) -> _Pipeline:
        context = InputContext(self._count, pipeline, 1)
        given = self._function.source(context, 1).model_input(self._class_weight)
        return _Pipeline(data_adapter(given, self._class_weight))


def first_batch(reader: PipelineReader) -> Any:
    """See `PipelineReader.first`; a function for workers."""
    return reader.first()
