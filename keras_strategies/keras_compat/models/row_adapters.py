"""Keras's adapter of a `PyDataset` with own rows of its batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np

from keras_strategies.keras_compat.models.input_adapters import RowsOfWorker


def own_rows_adapter(
    dataset: Any,
    shuffle: bool,
    class_weight: dict[int, float] | None,
    compared: Callable[[Iterator[Any], Callable[[Any], int]], Iterator[Any]],
) -> Any:
    """An `x` for `fit`, `evaluate` and `predict`, with own rows of each batch.

    Keras 3.15: `PyDatasetAdapter` reads the items in their order, in the dataset's
    threads or processes, and passes each to `_standardize_batch`.

    Args:
        dataset: `PyDataset` with items that are `WorkerBatch`.
        shuffle: bool, whether the order of batches is shuffled.
        class_weight: dict, weights of samples by their class.
        compared: callable of a pass and of a function of its items that returns the
            rows of the global batch; compares these with other workers.
    """
    from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter

    is_tensorflow = keras.backend.backend() == "tensorflow"

    class OwnRowsAdapter(PyDatasetAdapter):
        def _standardize_batch(self, item: Any) -> Any:
            batch = super()._standardize_batch(item.batch)
            if is_tensorflow:
                rows = sum(item.every)
                return RowsOfWorker(batch, np.zeros([rows, 0], bool))
            return dataclasses.replace(item, batch=batch)

        # Read by engines that keep rows on their workers. On TensorFlow, threads read
        # ahead, also in passes that end early: steps compare the rows.
        def own_batches(self) -> Iterator[Any]:
            return compared(self._get_iterator(), _rows_of)

        def batches_and_rows(self) -> Iterator[tuple[Any, int]]:
            for item in self._get_iterator():
                yield item.batch, _rows_of(item)

    return OwnRowsAdapter(dataset, class_weight, shuffle)


def has_own_rows(value: Any) -> bool:
    """Whether a value is of `own_rows_adapter`."""
    return hasattr(value, "batches_and_rows")


def _rows_of(item: Any) -> int:
    every = item.every
    return len(every) if isinstance(item, RowsOfWorker) else sum(every)
