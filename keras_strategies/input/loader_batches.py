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
    rows = own_rows_of(strategy)
    if rows is None or not isinstance(value, torch.utils.data.DataLoader):
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
    from keras_strategies.engines.torch.own_rows.loader_rows import LoaderRows

    known = getattr(loader, _READER, None)
    if known is None or known[0] is not workers:
        # It knows what reads have changed, and has processes that stay.
        known = workers, LoaderRows(loader, workers, rows)
        object.__setattr__(loader, _READER, known)
    reader: LoaderRows = known[1]

    def begin() -> Iterator[WorkerBatch]:
        for batch in reader.begin():
            own = isinstance(batch, WorkerBatch)
            yield batch if own else WorkerBatch(batch, [])

    return loader_adapter(loader, begin)
