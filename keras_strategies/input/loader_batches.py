"""Own rows of a `DataLoader` in `fit`, where Keras reads it as NumPy arrays.

On Torch Keras reads the loader itself, see `engines/torch/own_batches.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import keras

from keras_strategies.communication.communicator import Communicator
from keras_strategies.input.batches import loaded
from keras_strategies.keras_compat.models.row_adapters import loader_adapter
from keras_strategies.runtime.worker_batch import WorkerRows, own_rows_of

if TYPE_CHECKING:
    from keras_strategies.runtime.engine import StrategyCore

# The attribute of a loader for what reads its batches on one of the workers.
_READER = "__keras_strategies_reader__"


class _Reader:
    """Reads own rows of a loader in all methods, which copies of the loader have not.

    It has the processes that stay.

    Args:
        loader: a `torch.utils.data.DataLoader`.
        workers: the workers.
        rows: those of this worker.
    """

    def __init__(self, loader: Any, workers: Communicator, rows: WorkerRows):
        from keras_strategies.loaders.loader_rows import LoaderRows

        self.workers = workers
        self.begin = LoaderRows(loader, workers, rows).begin

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Pickled loaders have none: it holds connections.
        return type(None), ()


def with_own_rows(value: Any, strategy: StrategyCore | None) -> Any:
    """The input of Keras's `fit`, `evaluate` and `predict`, with this worker's rows.

    Args:
        value: the input that was given.
        strategy: the model's strategy; None for the default one.

    Returns:
        For a loader one with the random numbers of each row; or an adapter, where each
        worker can read its rows. Other input unchanged.
    """
    torch = loaded("torch")
    if torch is None or strategy is None:
        return value
    if not isinstance(value, torch.utils.data.DataLoader):
        return value
    from keras_strategies.loaders import loader_rows

    rows, workers = own_rows_of(strategy), strategy.workers
    if rows is None or workers is None or not loader_rows.can_read_rows(value):
        if workers is not None:
            loader_rows.warn_of_all_rows(value, workers)
        return loader_rows.seeded_loader(value)
    if keras.backend.backend() == "torch":
        return loader_rows.seeded_loader(value)
    return _adapter(value, workers, rows)


def _adapter(loader: Any, workers: Communicator, rows: WorkerRows) -> Any:
    reader: _Reader | None = getattr(loader, _READER, None)
    if reader is None or reader.workers is not workers:
        reader = _Reader(loader, workers, rows)
        object.__setattr__(loader, _READER, reader)
    return loader_adapter(loader, reader.begin)
