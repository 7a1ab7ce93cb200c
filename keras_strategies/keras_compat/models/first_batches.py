"""The first batch of `fit` and `evaluate`: a model is built from it, and sees it."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from typing import Any

import keras


def first_batch(epochs: Any) -> Any:
    """The first batch of an epoch iterator; its first epoch yields it too.

    Keras 3.15 reads `steps_per_execution` batches to build a model, and begins again.
    Input that can be read once has lost them by then, but for two of a generator. Here
    one batch is read; a pass over such input goes on after it. Other input is read
    again, so that its order is that of Keras: beginning another pass shuffles it again.

    Args:
        epochs: an epoch iterator that Keras resets afterwards.

    Returns:
        The batch; None for an empty input.
    """
    if _begins_again(epochs.data_adapter):
        iter(epochs)
        _, _, batches = next(epochs._epoch_iterator)
        return next(iter(batches), None)
    if keras.backend.backend() != "tensorflow":
        _begin_pass(epochs.data_adapter)
    batches = iter(epochs._get_iterator())
    read = list(itertools.islice(batches, 1))

    replaced = vars(epochs).get("_get_iterator")

    def first_pass() -> Iterator[Any]:
        discard_first_pass(epochs)
        if replaced is not None:
            epochs._get_iterator = replaced
        return itertools.chain(read, batches)

    epochs._get_iterator = first_pass
    return read[0] if read else None


def discard_first_pass(epochs: Any) -> None:
    """Makes an epoch iterator begin its next pass over the input itself."""
    vars(epochs).pop("_get_iterator", None)


def _begins_again(adapter: Any) -> bool:
    """Whether any batch can be read any number of times: of arrays, by an index.

    Keras 3.15: `ArrayDataAdapter`, `PyDatasetAdapter`, and
    `TorchDataLoaderAdapter._dataloader`.
    """
    from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
    from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter

    if isinstance(adapter, (ArrayDataAdapter, PyDatasetAdapter)):
        return True
    loader = getattr(adapter, "_dataloader", None)
    return loader is not None and not is_read_once(loader)


def is_read_once(loader: Any) -> bool:
    """Whether a `torch.utils.data.DataLoader` reads an iterable, perhaps a stream.

    Args:
        loader: `torch.utils.data.DataLoader`.
    """
    from torch.utils.data import IterableDataset

    return isinstance(loader.dataset, IterableDataset)


def is_read_for_shapes(value: Any) -> bool:
    """Whether Keras reads batches of a dataset for shapes, that `fit` does not see.

    Keras 3.15 on TensorFlow: the first two of a loader; one over a stream goes on after
    them.
    """
    torch = sys.modules.get("torch")
    return (
        keras.backend.backend() == "tensorflow"
        and torch is not None
        and isinstance(value, torch.utils.data.DataLoader)
        and is_read_once(value)
    )


def _begin_pass(adapter: Any) -> None:
    """Begins a pass and reads nothing: the next one is shuffled as Keras's second.

    Keras 3.15: `TFDatasetAdapter._dataset`, `TorchDataLoaderAdapter._dataloader`.
    """
    from keras.src.trainers.data_adapters.generator_data_adapter import (
        GeneratorDataAdapter,
    )

    for name in ("_dataset", "_dataloader"):
        if hasattr(adapter, name):
            iter(getattr(adapter, name))
    begin = getattr(adapter, "begin", None)
    if begin is not None:
        # A `batches_adapter`: the pass that is not read, and the one that is.
        begin()
        begin()
    elif keras.backend.backend() == "torch" and type(adapter) is GeneratorDataAdapter:
        # A pass begins by a draw of Torch's, before it reads.
        iter(adapter.get_torch_dataloader())
