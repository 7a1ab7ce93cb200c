"""Batches that begin to move to a device before the one before them is used."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

Batch = TypeVar("Batch")
Moved = TypeVar("Moved")


def prefetch_one(
    batches: Iterable[Batch], move: Callable[[Batch], Callable[[], Moved]]
) -> Iterator[Moved]:
    """Moves batches, each while the one before it is computed with.

    Args:
        batches: the batches. Where they end with an error, those before it are used
            first, as without moving ahead.
        move: begins to move a batch and returns a callable, which is called when the
            batch is asked for and returns it at its place.

    Yields:
        The batches in their order.

    Example:

    >>> list(prefetch_one([1, 2], lambda batch: lambda: batch * 10))
    [10, 20]
    """
    waiting = iter(batches)
    arrive: Callable[[], Moved] | None = None
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
