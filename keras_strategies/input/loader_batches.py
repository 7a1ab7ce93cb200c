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

# The attribute of a loader for what reads its batches on one of the workers.
_READER = "__keras_strategies_reader__"


class _Reader:
    """Reads own rows of a loader in all methods, which copies of the loader have not.

    It knows what reads have changed, and has processes that stay.

    Args:
        loader: a `torch.utils.data.DataLoader`.
        workers: the workers.
        rows: those of this worker.
    """

    def __init__(self, loader: Any, workers: Communicator, rows: WorkerRows):
        from keras_strategies.engines.torch.own_rows.loader_rows import LoaderRows

        self.workers = workers
        self._rows = LoaderRows(loader, workers, rows)

    def begin(self) -> Iterator[WorkerBatch]:
        """A pass; every worker has all rows of a batch that it does not share."""
        for batch in self._rows.begin():
            is_own = isinstance(batch, WorkerBatch)
            yield batch if is_own else WorkerBatch(batch, [])

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Pickled loaders have none: it holds connections.
        return type(None), ()


def with_own_rows(value: Any, strategy: StrategyCore | None) -> Any:
    """The input of Keras's `fit`, `evaluate` and `predict`, with this worker's rows.

    Args:
        value: the input that was given.
        strategy: the model's strategy; None for the default one.

    Returns:
        An adapter for a loader of which each worker can read its rows; other input
        unchanged.
    """
    torch = loaded("torch")
    if torch is None or keras.backend.backend() == "torch":
        return value
    if not isinstance(value, torch.utils.data.DataLoader):
        return value
    rows = own_rows_of(strategy)
    if rows is None:
        return value
    from keras_strategies.engines.torch.own_rows import loader_rows

    assert strategy is not None and strategy.workers is not None
    # A worker that joins could not agree on what a read has changed.
    is_fixed = strategy.workers.actions.is_fixed
    if loader_rows.can_read_rows(value) and (
        is_fixed or loader_rows.reads_alike(value.dataset)
    ):
        return _adapter(value, strategy.workers, rows)
    return value


def _adapter(loader: Any, workers: Communicator, rows: WorkerRows) -> Any:
    reader: _Reader | None = getattr(loader, _READER, None)
    if reader is None or reader.workers is not workers:
        reader = _Reader(loader, workers, rows)
        object.__setattr__(loader, _READER, reader)
    return loader_adapter(loader, reader.begin)
