"""Batches made ahead: by a thread, which always ends, or by one for accelerators."""

from __future__ import annotations

import threading

import pytest

from keras_strategies.input.prefetch import Prefetcher
from keras_strategies.runtime.batch_prefetch import prefetch_one

pytestmark = pytest.mark.one_backend("jax")


def test_it_works_ahead_by_its_size_and_no_further() -> None:
    made = []
    making = threading.Semaphore(0)

    def items():
        for i in range(10):
            made.append(i)
            making.release()
            yield i

    prefetcher = Prefetcher(items, 2)
    for taken in range(5):
        # Before the item is taken there is room for this many, and none for more.
        while len(made) < taken + 2:
            assert making.acquire(timeout=5)
        assert made == list(range(taken + 2))
        assert next(prefetcher) == taken
    prefetcher.close()


# One batch ahead, for an accelerator: it moves before the one before it is used.


class Mover:
    """Notes when a batch begins to move and when it is used."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def __call__(self, batch):
        self.events.append(f"move {batch}")

        def arrive():
            self.events.append(f"use {batch}")
            return batch * 10

        return arrive


def test_each_batch_after_the_first_moves_before_the_one_before_it_is_used() -> None:
    mover = Mover()
    assert list(prefetch_one(iter([1, 2, 3]), mover)) == [10, 20, 30]
    assert mover.events == [
        # Keras reads the first one of a pass to build a model, and no other.
        *("move 1", "use 1"),
        *("move 2", "move 3", "use 2"),
        "use 3",
    ]


def test_no_batch_is_read_ahead_after_the_last_step_of_an_epoch() -> None:
    """A generator is where it would be without prefetch: another `fit` may go on."""
    mover, source = Mover(), iter(range(1, 7))
    ahead = prefetch_one(source, mover, steps=2)
    assert [next(ahead) for _ in range(4)] == [10, 20, 30, 40]
    assert list(source) == [5, 6]
    assert mover.events[2:] == ["move 2", "use 2", "move 3", "move 4", "use 3", "use 4"]
