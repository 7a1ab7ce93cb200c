"""Prefetch: one batch is transferred and compared while the previous one is used."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from keras_strategies.communication.worker_steps import WorkerSteps

# After the last batch.
_END: Any = object()
Batch = TypeVar("Batch")
Moved = TypeVar("Moved")


def prefetch_one(
    batches: Iterable[Batch],
    move: Callable[[Batch], Callable[[], Moved]],
    steps: int | None = None,
) -> Iterator[Moved]:
    """Moves each batch while the previous one is used.

    The second is read when it is asked for: Keras reads the first batch of a pass to
    build a model, and reading others may draw from random numbers of the process.

    Args:
        batches: the batches. An error of the iterable is raised after the batches
            before it.
        move: starts the transfer of a batch and returns a callable that waits for it
            and returns the batch on the device.
        steps: int, after as many batches the next one is not read before it is asked
            for: another `fit` may go on with the same generator. None without limit.

    Yields:
        The batches in their order.

    Example:

    >>> list(prefetch_one([1, 2], lambda batch: lambda: batch * 10))
    [10, 20]
    """
    waiting = iter(batches)
    arrive: Callable[[], Moved] | None = None
    for number in itertools.count():
        if arrive is None:
            try:
                arrive = move(next(waiting))
            except StopIteration:
                return
        error: Exception | None = None
        following: Callable[[], Moved] | None = None
        if is_ahead := number > 0 and not (steps and (number + 1) % steps == 0):
            try:
                following = move(next(waiting))
            except StopIteration:
                pass
            except Exception as caught:
                error = caught
        yield arrive()
        if error is not None:
            raise error
        arrive = following
        if is_ahead and following is None:
            return


def compared_ahead(
    batches: Iterable[Batch],
    begin: Callable[[Batch], Moved],
    workers: WorkerSteps,
    steps: int | None = None,
) -> Iterator[Moved]:
    """Compares each batch with other workers' while the previous one is used.

    A worker without more batches compares its end as often as others compare theirs, so
    that later calls of all workers match, also after an error.

    Args:
        batches: the batches.
        begin: begins to compare a batch, and returns what its step uses.
        workers: the steps of this worker, which await the comparisons.
        steps: see `prefetch_one`.
    """

    def begin_next(batch: Any) -> Any:
        if batch is not _END:
            return begin(batch)
        workers.check_end()
        return _END

    def move(batch: Any) -> Callable[[], Any]:
        return workers.for_later(lambda: begin_next(batch))

    following = itertools.chain(batches, itertools.repeat(_END))
    for moved in prefetch_one(following, move, steps):
        if moved is _END:
            workers.await_checks()
            return
        yield moved
