"""Sums of replicas that are added to variables, of several metrics in one message."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import keras

from keras_strategies.runtime.replicas.replica_set import RowSplit


@dataclass(frozen=True)
class AddedSums:
    """What one call adds to variables.

    Args:
        row_split: the rows of the call.
        sums: pairs of a `keras.Variable` and the sum over this worker's replicas, on
            the device of the variables.
        device: callable that enters this device.
    """

    row_split: RowSplit
    sums: Sequence[tuple[Any, Any]]
    device: Callable[[], contextlib.AbstractContextManager[Any]]

    def add(self) -> None:
        """Adds them, at the latest when `sent_together` ends."""
        waiting = _waiting.get()
        if waiting is None:
            _add([self])
        else:
            waiting.append(self)


_waiting: contextvars.ContextVar[list[AddedSums] | None] = contextvars.ContextVar(
    "waiting_sums", default=None
)


@contextlib.contextmanager
def sent_together() -> Iterator[None]:
    """Workers send all sums of the calls in it at once.

    No call in it may read what another adds.
    """
    if _waiting.get() is not None:
        yield
        return
    waiting: list[AddedSums] = []
    token = _waiting.set(waiting)
    try:
        yield
    finally:
        _waiting.reset(token)
    while waiting:
        workers = waiting[0].row_split.workers
        _add([each for each in waiting if each.row_split.workers is workers])
        waiting = [each for each in waiting if each.row_split.workers is not workers]


def _add(every: Sequence[AddedSums]) -> None:
    with every[0].device():
        pairs = [pair for each in every for pair in each.sums]
        totals = every[0].row_split.summed([total for _, total in pairs])
        for (variable, _), total in zip(pairs, totals, strict=True):
            variable.assign(variable + keras.ops.cast(total, variable.dtype))
