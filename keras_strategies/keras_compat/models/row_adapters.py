"""Keras's adapter of a `PyDataset` with own rows of its batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import keras

from keras_strategies.keras_compat.models.input_adapters import as_element


def own_rows_adapter(
    dataset: Any,
    shuffle: bool,
    class_weight: dict[int, float] | None,
    compared: Callable[[Iterator[Any]], Iterator[Any]],
) -> Any:
    """An `x` for `fit`, `evaluate` and `predict`, with own rows of each batch.

    Keras 3.15: `PyDatasetAdapter` reads the items in their order, in the dataset's
    threads or processes, and passes each to `_standardize_batch`.

    Args:
        dataset: `PyDataset` with items that are an index and a `WorkerBatch`.
        shuffle: bool, whether the order of batches is shuffled.
        class_weight: dict, weights of samples by their class.
        compared: callable of a pass of `WorkerBatch` that yields it; compares the rows
            of the global batches with other workers.
    """
    from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter

    class OwnRowsAdapter(PyDatasetAdapter):
        # Whether batches are elements of a `tf.data.Dataset`, in which threads read
        # ahead, also in passes that end early: steps compare the rows.
        _are_elements = keras.backend.backend() == "tensorflow"

        def _standardize_batch(self, item: Any) -> Any:
            index, batch = item
            batch = dataclasses.replace(batch, again=lambda: self.py_dataset[index][1])
            batch = batch.changed(super()._standardize_batch)
            return as_element(batch) if self._are_elements else batch

        # Read by engines that keep rows on their workers.
        def own_batches(self) -> Iterator[Any]:
            return compared(self.worker_batches())

        def worker_batches(self) -> Iterator[Any]:
            self._are_elements = False
            return self._get_iterator()  # type: ignore[no-any-return]

    return OwnRowsAdapter(dataset, class_weight, shuffle)


def has_own_rows(value: Any) -> bool:
    """Whether a value is of `own_rows_adapter`."""
    return hasattr(value, "worker_batches")
