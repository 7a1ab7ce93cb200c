"""Keras's adapters with own rows of the batches of their input."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np

from keras_strategies.keras_compat.models.input_adapters import as_element


def own_rows_adapter(
    dataset: Any,
    shuffle: bool,
    class_weight: dict[int, float] | None,
) -> Any:
    """An `x` for `fit`, `evaluate` and `predict`, with own rows of each batch.

    Keras 3.15: `PyDatasetAdapter` reads the items in their order, in the dataset's
    threads or processes, and passes each to `_standardize_batch`.

    Args:
        dataset: `PyDataset` with items that are an index and a `WorkerBatch`.
        shuffle: bool, whether the order of batches is shuffled.
        class_weight: dict, weights of samples by their class.
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

        is_of_rows = True

        # Read by engines that keep rows on their workers.
        def own_batches(self) -> Iterator[Any]:
            self._are_elements = False
            return self._get_iterator()  # type: ignore[no-any-return]

    return OwnRowsAdapter(dataset, class_weight, shuffle)


def has_own_rows(value: Any) -> bool:
    """Whether a value is of `own_rows_adapter`."""
    return hasattr(value, "is_of_rows")


def loader_adapter(loader: Any, begin: Callable[[], Iterator[Any]]) -> Any:
    """An `x` for `fit`, `evaluate` and `predict`, with own rows of a loader's batches.

    Keras 3.15: `TorchDataLoaderAdapter` reads a pass when its first batch is requested,
    and makes NumPy arrays of tensors. On TensorFlow it reads some batches before, for
    their shapes (`_output_signature`).

    Args:
        loader: `torch.utils.data.DataLoader`.
        begin: starts a pass of `WorkerBatch`.
    """
    from keras.src.trainers.data_adapters import data_adapter_utils
    from keras.src.trainers.data_adapters.torch_data_loader_adapter import (
        TorchDataLoaderAdapter,
    )

    def array(leaf: Any) -> Any:
        return np.asarray(leaf.cpu())

    def arrays(batch: Any) -> Any:
        return tuple(keras.tree.map_structure(array, batch, none_is_leaf=False))

    class LoaderAdapter(TorchDataLoaderAdapter):
        # Workers compare what they read: no thread may read ahead.
        is_read_by_steps = True
        _output_signature: Any

        # Read by engines that keep rows on their workers.
        def own_batches(self) -> Iterator[Any]:
            for batch in begin():
                yield batch.changed(arrays)

        def get_tf_dataset(self) -> Any:
            if self._output_signature is None:
                count = data_adapter_utils.NUM_BATCHES_FOR_TENSOR_SPEC
                read = [
                    own.batch for own in itertools.islice(self.own_batches(), count)
                ]
                self._output_signature = tuple(data_adapter_utils.get_tensor_spec(read))
            return super().get_tf_dataset()

    return LoaderAdapter(loader)


def is_loader_adapter(value: Any) -> bool:
    """Whether a value is of `loader_adapter`."""
    return hasattr(value, "is_read_by_steps")
