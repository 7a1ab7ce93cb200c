"""Prefetch to a device: one batch is transferred while the previous one is used."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

Batch = TypeVar("Batch")
Moved = TypeVar("Moved")


def prefetch_one(
    batches: Iterable[Batch], move: Callable[[Batch], Callable[[], Moved]]
) -> Iterator[Moved]:
    """Moves each batch while the previous one is used.

    The second is read when it is asked for: Keras reads the first batch of a pass to
    build a model, and reading others may draw from random numbers of the process.

    Args:
        batches: the batches. An error of the iterable is raised after the batches
            before it.
        move: starts the transfer of a batch and returns a callable that waits for it
            and returns the batch on the device.

    Yields:
        The batches in their order.

    Example:

    >>> list(prefetch_one([1, 2], lambda batch: lambda: batch * 10))
    [10, 20]
    """
    waiting = iter(batches)
    arrive: Callable[[], Moved] | None = None
    try:
        arrive = move(next(waiting))
    except StopIteration:
        return
    yield arrive()
    arrive = None
    while True:
        error: Exception | None = None
        following: Callable[[], Moved] | None = None
        try:
            following = move(next(waiting))
        except StopIteration:
            pass
        except Exception as caught:
            error = caught
        if arrive is not None:
            yield arrive()
        if error is not None:
            raise error
        if following is None:
            return
        arrive = following
