"""Global batches of separate pipelines of the workers, each with its own rows.

If workers have separate pipelines, a global batch is the concatenation of their
batches. Workers may have different amounts of data: one without more batches
contributes no rows until all workers have ended, so that all take the same steps.
Workers exchange numbers of rows; batches stay where they are.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from keras_strategies.communication.communicator import Communicator
from keras_strategies.errors import BatchError
from keras_strategies.input.batches import as_numpy, rows_of
from keras_strategies.input.sources import Source, source_of
from keras_strategies.keras_compat.models.input_adapters import batches_adapter
from keras_strategies.runtime.row_splits import split_sizes
from keras_strategies.runtime.worker_batch import WorkerBatch

_streams = itertools.count()


class WorkersSource(Source):
    """Global batches of datasets that differ between workers.

    Args:
        own: this worker's dataset.
        workers: the workers.
    """

    def __init__(self, own: Source, workers: Communicator):
        super().__init__(own.given)
        self._own = own
        self._workers = workers
        self._group = workers.group
        self._cardinality = _most(
            self._group.gather_values("the number of batches", own.cardinality)
        )

    def read(self) -> Iterator[Any]:
        """This worker's rows of each global batch."""
        return (each.batch for each in self.own_rows())

    def own_rows(self) -> Iterator[WorkerBatch]:
        """A pass in which each worker has its own rows.

        Workers exchange how many they have, and of which kind.
        """
        # Frameworks may read several passes on separate threads: each needs a stream.
        stream = f"input {next(_streams)}"
        batches = self._own.batches()
        counts = self._workers.replica_counts
        while True:
            batch = next(batches, None)
            arrays: list[Any] = []
            own = None
            if batch is not None:
                plan = _plan(batch, arrays, self._own.may_reuse_memory)
                own = [rows_of(batch), _without_rows(plan)]
            found = self._group.gather_values("a batch", own, stream)
            present = {i: each[1] for i, each in enumerate(found) if each is not None}
            if not present:
                return
            plan = _common_plan(present)
            if batch is None:
                arrays = [np.zeros(s, _dtype(name)) for name, s in _arrays_of(plan)]
            rows = [0 if each is None else each[0] for each in found]
            every = [
                size
                for own_rows, count in zip(rows, counts.by_worker, strict=True)
                for size in split_sizes(own_rows, count)
            ]
            yield WorkerBatch(_structure(plan, iter(arrays)), every)

    def begin(self) -> None:
        self._own.begin()

    @property
    def cardinality(self) -> int | None:
        return self._cardinality

    def spec(self) -> Any:
        return self._own.spec()

    def model_input(self, class_weight: dict[int, float] | None = None) -> Any:
        return batches_adapter(
            self.batches,
            self.cardinality,
            class_weight,
            self.begin,
            own=self.own_rows,
        )


def over_workers(own: Any, workers: Communicator) -> WorkersSource:
    """Global batches of any kind of dataset."""
    return WorkersSource(source_of(own), workers)


def _most(counts: list[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return max(known) if len(known) == len(counts) else None


def _plan(value: Any, arrays: list[Any], copy: bool = False) -> Any:
    """The structure of a batch, with dtypes and shapes in the place of its arrays.

    Args:
        value: the batch.
        arrays: list that gets the arrays, in the memory of the host.
        copy: bool, whether their owner may overwrite them.

    Raises:
        ValueError: for arrays of Python objects.
    """
    if value is None:
        return None
    if isinstance(value, dict):
        return {
            "dict": [[key, _plan(each, arrays, copy)] for key, each in value.items()]
        }
    if isinstance(value, (list, tuple)):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_plan(each, arrays, copy) for each in value]}
    array = np.ascontiguousarray(as_numpy(value))
    if array.dtype.hasobject:
        raise BatchError(
            "Batches of workers are arrays of numbers, but this one has an array of "
            f"Python objects of shape {array.shape}. Convert it to numbers "
            "first, for example with keras.layers.StringLookup."
        )
    arrays.append(array.copy() if copy and isinstance(value, np.ndarray) else array)
    return {"array": [array.dtype.name, list(array.shape)]}


def _structure(plan: Any, arrays: Iterator[Any]) -> Any:
    """The batch of a plan, from its arrays."""
    if plan is None:
        return None
    [(kind, value)] = plan.items()
    if kind == "dict":
        return {key: _structure(each, arrays) for key, each in value}
    if kind == "list":
        return [_structure(each, arrays) for each in value]
    if kind == "tuple":
        return tuple(_structure(each, arrays) for each in value)
    return next(arrays)


def _arrays_of(plan: Any) -> Iterator[tuple[str, list[int]]]:
    """The dtypes and shapes of a plan's arrays, in their order."""
    if plan is None:
        return
    [(kind, value)] = plan.items()
    if kind == "array":
        yield value[0], value[1]
        return
    for each in value:
        yield from _arrays_of(each[1] if kind == "dict" else each)


def _without_rows(plan: Any) -> Any:
    """The plan for zero rows."""
    if plan is None:
        return None
    [(kind, value)] = plan.items()
    if kind == "array":
        return {kind: [value[0], [0, *value[1][1:]]]}
    if kind == "dict":
        return {kind: [[key, _without_rows(each)] for key, each in value]}
    return {kind: [_without_rows(each) for each in value]}


def _common_plan(plans: dict[int, Any]) -> Any:
    """The plan of the workers' batches.

    Raises:
        BatchError: if they differ.
    """
    first, plan = next(iter(plans.items()))
    for worker, other in plans.items():
        if other != plan:
            raise BatchError(
                "The batches of workers form one global batch, but they differ in "
                f"structure, dtypes or shapes: worker {first} has {_named(plan)}, "
                f"worker {worker} has {_named(other)}. Make them equal in the dataset "
                "of each worker."
            )
    return plan


def _named(plan: Any) -> str:
    return ", ".join(
        f"{name} of shape {(None, *shape[1:])}" for name, shape in _arrays_of(plan)
    )


def _dtype(name: str) -> np.dtype[Any]:
    try:
        return np.dtype(name)
    except TypeError:  # bfloat16 and others, which NumPy lacks.
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name))
