"""A global batch of which this worker has its own rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class WorkerBatch:
    """This worker's rows of a global batch, which follow those of the worker before it.

    Args:
        batch: structure of arrays or tensors on the host with these rows.
        every: list of int, the rows of each replica, of all workers in order.
    """

    batch: Any
    every: list[int]


def own_rows(batch: Any) -> Any:
    """This worker's rows of a `WorkerBatch`; other batches unchanged."""
    return batch.batch if isinstance(batch, WorkerBatch) else batch
