"""The thread that makes batches ahead, and that it always ends."""

from __future__ import annotations

import gc
import threading

import pytest

from keras_strategies.input.prefetch import Prefetcher

pytestmark = pytest.mark.one_backend("jax")


def threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "ks-input"]


def join(before: list[threading.Thread]) -> None:
    """Waits for threads that have been told to end; fails if one does not."""
    for thread in before:
        thread.join(5)
        assert not thread.is_alive()


def test_items_arrive_in_order_and_the_thread_ends() -> None:
    prefetcher = Prefetcher(lambda: iter(range(100)), 3)
    assert list(prefetcher) == list(range(100))
    assert not threads()
    with pytest.raises(StopIteration):
        next(prefetcher)


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


def test_an_error_arrives_after_the_items_before_it_with_its_type() -> None:
    class OwnError(Exception):
        pass

    def items():
        yield 1
        raise OwnError("disk")

    prefetcher = Prefetcher(items, 4)
    assert next(prefetcher) == 1
    with pytest.raises(OwnError, match="disk"):
        next(prefetcher)
    assert not threads()
    with pytest.raises(StopIteration):
        next(prefetcher)


def test_an_error_before_the_first_item() -> None:
    def items():
        raise OSError("no file")

    with pytest.raises(OSError, match="no file"):
        next(Prefetcher(items, 1))
    assert not threads()


def test_close_ends_the_thread_and_the_iterator_below() -> None:
    closed = []

    def items():
        try:
            while True:
                yield 0
        finally:
            closed.append(True)

    prefetcher = Prefetcher(items, 1)
    next(prefetcher)
    prefetcher.close()
    prefetcher.close()
    assert closed == [True]
    assert not threads()


def test_an_iterator_that_nobody_holds_ends_its_thread() -> None:
    def endless():
        while True:
            yield 0

    for item in Prefetcher(endless, 2):
        assert item == 0
        break
    gc.collect()
    join(threads())


def test_memory_of_taken_items_is_not_kept() -> None:
    import weakref

    class Item:
        pass

    def items():
        for _ in range(3):
            yield Item()

    prefetcher = Prefetcher(items, 1)
    first = weakref.ref(next(prefetcher))
    next(prefetcher)
    gc.collect()
    assert first() is None
    prefetcher.close()
