"""Global batches joined from separate pipelines of the workers.

If workers have separate pipelines, a global batch is the concatenation of their
batches. Workers may have different amounts of data: one without more batches
contributes no rows until all workers have ended, so that all take the same steps.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from keras_strategies.cluster.group import WorkerGroup
from keras_strategies.errors import BatchError
from keras_strategies.input.batches import as_numpy, join_rows
from keras_strategies.input.sources import Source, source_of
from keras_strategies.keras_compat.models.input_adapters import batches_adapter

_streams = itertools.count()


class WorkersSource(Source):
    """Global batches of datasets that differ between workers.

    Args:
        own: this worker's dataset.
        group: the workers.
    """

    def __init__(self, own: Source, group: WorkerGroup):
        super().__init__(own.given)
        self._own = own
        self._group = group
        self._cardinality = _most(
            group.gather_values("the number of batches", own.cardinality)
        )

    def read(self) -> Iterator[Any]:
        # Frameworks may read several passes on separate threads: each needs a stream.
        stream = f"input {next(_streams)}"
        batches = self._own.batches()
        while True:
            batch = next(batches, None)
            message = b"" if batch is None else encode(batch)
            parts = self._group.gather("a batch", message, stream)
            found = [decode(part) for part in parts if part]
            if not found:
                return
            yield join_rows(found)

    def begin(self) -> None:
        self._own.begin()

    @property
    def cardinality(self) -> int | None:
        return self._cardinality

    def spec(self) -> Any:
        return self._own.spec()

    def model_input(self, class_weight: dict[int, float] | None = None) -> Any:
        return batches_adapter(self.batches, self.cardinality, class_weight, self.begin)


def over_workers(own: Any, group: WorkerGroup) -> WorkersSource:
    """Global batches of any kind of dataset."""
    return WorkersSource(source_of(own), group)


def _most(counts: list[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return max(known) if len(known) == len(counts) else None


def encode(batch: Any) -> bytes:
    """Encodes a structure of arrays as bytes, without executable content.

    Raises:
        ValueError: for arrays of Python objects.
    """
    arrays: list[Any] = []

    def plan(value: Any) -> Any:
        if value is None:
            return None
        if isinstance(value, dict):
            return {"dict": [[key, plan(each)] for key, each in value.items()]}
        if isinstance(value, (list, tuple)):
            kind = "list" if isinstance(value, list) else "tuple"
            return {kind: [plan(each) for each in value]}
        array = np.ascontiguousarray(as_numpy(value))
        if array.dtype.hasobject:
            raise BatchError(
                "Workers exchange batches of numbers, but this one has an array of "
                f"Python objects of shape {array.shape}. Convert it to numbers "
                "first, for example with keras.layers.StringLookup."
            )
        arrays.append(array)
        return {"array": [array.dtype.name, list(array.shape)]}

    header = json.dumps(plan(batch)).encode()
    return b"\n".join([header, b"".join(array.tobytes() for array in arrays)])


def decode(message: bytes) -> Any:
    """Decodes a structure of arrays from bytes of `encode`."""
    header, _, data = message.partition(b"\n")
    start = 0

    def make(plan: Any) -> Any:
        nonlocal start
        if plan is None:
            return None
        [(kind, value)] = plan.items()
        if kind == "dict":
            return {key: make(each) for key, each in value}
        if kind == "list":
            return [make(each) for each in value]
        if kind == "tuple":
            return tuple(make(each) for each in value)
        dtype, shape = _dtype(value[0]), tuple(value[1])
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        array = np.frombuffer(data[start : start + size], dtype).reshape(shape)
        start += size
        return array

    return make(json.loads(header))


def _dtype(name: str) -> np.dtype[Any]:
    try:
        return np.dtype(name)
    except TypeError:  # bfloat16 and others, which NumPy lacks.
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name))
