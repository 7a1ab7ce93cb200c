"""Batches for an accelerator begin to move before the one before them is used."""

from __future__ import annotations

import gc
import weakref

import pytest

from keras_strategies.runtime.batch_prefetch import prefetch_one

pytestmark = pytest.mark.one_backend


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


@pytest.mark.parametrize("count", [0, 1, 2])
def test_the_end_comes_after_the_last_batch(count) -> None:
    ahead = prefetch_one(range(count), Mover())
    assert [next(ahead) for _ in range(count)] == [10 * i for i in range(count)]
    assert next(ahead, "end") == next(ahead, "end") == "end"


def test_no_more_than_one_batch_is_asked_for_ahead() -> None:
    asked = []

    def batches():
        while True:
            asked.append(len(asked))
            yield asked[-1]

    ahead = prefetch_one(batches(), Mover())
    assert asked == []
    assert [next(ahead), next(ahead)] == [0, 10]
    assert asked == [0, 1, 2]


def test_the_batches_before_an_error_are_used_first() -> None:
    def batches():
        yield 1
        yield 2
        raise OSError("the disk is gone")

    ahead = prefetch_one(batches(), Mover())
    assert [next(ahead), next(ahead)] == [10, 20]
    with pytest.raises(OSError, match="the disk is gone"):
        next(ahead)
    assert next(ahead, "end") == "end"


def test_an_error_while_a_batch_is_moved_arrives_in_its_turn() -> None:
    def move(batch):
        if batch == 2:
            raise MemoryError("no room on the device")
        return lambda: batch

    ahead = prefetch_one([1, 2, 3], move)
    assert next(ahead) == 1
    with pytest.raises(MemoryError, match="no room"):
        next(ahead)


def test_batches_that_were_used_are_let_go() -> None:
    class Batch:
        pass

    alive: list[weakref.ref] = []

    def batches():
        for _ in range(4):
            batch = Batch()
            alive.append(weakref.ref(batch))
            yield batch
            del batch

    def move(batch):
        return lambda: batch

    ahead = prefetch_one(batches(), move)
    next(ahead), next(ahead)
    gc.collect()
    assert [ref() is not None for ref in alive] == [False, True, True]
    ahead.close()
