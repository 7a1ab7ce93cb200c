"""The request and the reply of one step between a worker and a server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

#: Name of a shard: the variable's number and the shard's first row.
Key = tuple[int, int]


#: Name of an update: the task's number and the update's number in the task.
UpdateId = tuple[int, int]


@dataclass(frozen=True)
class StepRequest:
    """Request of a step: update to apply and values to reply with.

    Args:
        update: name of the update; None without one.
        done: int, tasks below this number are finished.
        optimizers: for each optimizer its number, pairs of a shard and its gradient,
            and triples of a shard, rows and their gradients.
        adds: pairs of a shard and an array to add.
        writes: pairs of a shard and its new value.
        pull: shards to send in full.
        pull_rows: triples of a shard, rows to send, and the number of rows of the
            padded reply.
    """

    update: UpdateId | None = None
    done: int = 0
    optimizers: tuple[tuple[int, list[Any], list[Any]], ...] = ()
    adds: tuple[tuple[Key, np.ndarray], ...] = ()
    writes: tuple[tuple[Key, np.ndarray], ...] = ()
    pull: tuple[Key, ...] = ()
    pull_rows: tuple[tuple[Key, np.ndarray, int], ...] = ()


@dataclass(frozen=True)
class StepReply:
    """Reply to a `StepRequest`.

    Args:
        dense: shards.
        rows: padded rows of shards.
        version: int, number of updates applied to these values.
    """

    dense: list[np.ndarray]
    rows: list[np.ndarray]
    version: int
