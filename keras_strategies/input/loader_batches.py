"""Own rows of a `DataLoader` in `fit`, where Keras reads it as NumPy arrays.

On Torch Keras reads the loader itself, see `engines/torch/own_rows/own_batches.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import keras

from keras_strategies.communication.communicator import Communicator
from keras_strategies.input.batches import loaded
from keras_strategies.keras_compat.models.row_adapters import loader_adapter
from keras_strategies.runtime.worker_batch import (
    WorkerBatch,
    WorkerRows,
    own_rows_of,
)

if TYPE_CHECKING:
    from keras_strategies.runtime.engine import StrategyCore

# An attribute of a loader: the workers, and what reads its batches on one of them.
_READER = "__keras_strategies_reader__"


def has_rows_of_workers(value: Any, strategy: StrategyCore | None) -> bool:
    """Whether a value is a loader of which each worker can read its rows.

    Args:
        value: the input of `fit`, `evaluate` or `predict`.
        strategy: the model's strategy; None for the default one.
    """
    torch = loaded("torch")
    if torch is None or keras.backend.backend() == "torch":
        return False
    if not isinstance(value, torch.utils.data.DataLoader):
        return False
    if strategy is None or strategy.workers is None or own_rows_of(strategy) is None:
        return False
    from keras_strategies.engines.torch.own_rows import loader_rows

    # A worker that joins could not agree on what a read has changed.
    return loader_rows.can_read_rows(value) and (
        strategy.workers.actions.is_fixed or loader_rows.reads_alike(value.dataset)
    )


def own_loader_rows(loader: Any, workers: Communicator, rows: WorkerRows) -> Any:
    """The input of Keras's `fit`, `evaluate` and `predict`, with this worker's rows.

    Args:
        loader: a `torch.utils.data.DataLoader` that `has_rows_of_workers`.
        workers: the workers.
        rows: the rows of each worker.
    """
    from keras_strategies.engines.torch.own_rows.loader_rows import LoaderRows

    of_workers, reader = getattr(loader, _READER, (None, None))
    if of_workers is not workers:
        # It knows what reads have changed, and has processes that stay.
        reader = LoaderRows(loader, workers, rows)
        object.__setattr__(loader, _READER, (workers, reader))

    def begin() -> Iterator[Any]:
        yield from reader.begin()

    def as_own(batch: Any) -> WorkerBatch:
        return WorkerBatch(batch, [])

    return loader_adapter(loader, begin, as_own)
