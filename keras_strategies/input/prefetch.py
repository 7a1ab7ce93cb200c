"""Prefetch thread."""

from __future__ import annotations

import atexit
import collections
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

_JOIN_SECONDS = 5.0


class _Buffer:
    """Buffer between the producer and the consumer thread.

    Its lock is reentrant, as a `Condition`'s is by default: the garbage collector may
    close the buffer on a thread that holds the lock.
    """

    def __init__(self, size: int):
        self._size = size
        self._items: collections.deque[Any] = collections.deque()
        self._changed = threading.Condition()
        self._closed = False
        self._ended = False
        self._error: BaseException | None = None

    def wait_for_room(self) -> bool:
        """Waits until there is room for another item; False if the buffer is closed."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or len(self._items) < self._size
            )
            return not self._closed

    def put(self, item: Any) -> None:
        with self._changed:
            if not self._closed:
                self._items.append(item)
            self._changed.notify_all()

    def end(self, error: BaseException | None) -> None:
        """Marks the end of the items, with the error that ended them, if any."""
        with self._changed:
            self._ended = True
            self._error = error
            self._changed.notify_all()

    def take(self) -> Any:
        """The next item; after the last one raises the error, or `StopIteration`."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._items or self._ended)
            if self._items:
                item = self._items.popleft()
                self._changed.notify_all()
                return item
            error, self._error = self._error, None
        raise StopIteration if error is None else error

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._items.clear()
            self._changed.notify_all()


def _produce(make: Callable[[], Iterator[Any]], buffer: _Buffer) -> None:
    error = None
    try:
        items = make()
        try:
            while buffer.wait_for_room():
                try:
                    item = next(items)
                except StopIteration:
                    break
                buffer.put(item)
                del item  # So that only the consumer refers to it.
        finally:
            close = getattr(items, "close", None)
            if close is not None:
                close()
    except BaseException as caught:
        error = caught
    buffer.end(error)


_alive: weakref.WeakSet[Prefetcher] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    # A daemon thread inside a framework at the interpreter's end can crash it.
    for prefetcher in list(_alive):
        prefetcher.close()


class Prefetcher:
    """Iterator that prefetches items on a thread.

    The thread ends after the last item, at an error, which is raised to the consumer,
    when the prefetcher is closed, and when it is garbage-collected.

    Args:
        make: callable that returns an iterator; called on the thread. It must not
            refer to the prefetcher, which would then never be collected.
        size: int, items to have ready, 1 or more.
    """

    def __init__(self, make: Callable[[], Iterator[Any]], size: int):
        self._buffer = _Buffer(size)
        self._thread = threading.Thread(
            target=_produce, args=(make, self._buffer), name="ks-input", daemon=True
        )
        weakref.finalize(self, self._buffer.close).atexit = False
        _alive.add(self)
        self._thread.start()

    def __iter__(self) -> Prefetcher:
        return self

    def __next__(self) -> Any:
        try:
            return self._buffer.take()
        except BaseException:
            # Ended, failed or interrupted: no more items are taken.
            self.close()
            raise

    def close(self) -> None:
        """Ends the thread, after the item that it is reading."""
        self._buffer.close()
        if self._thread is not threading.current_thread():
            self._thread.join(_JOIN_SECONDS)
