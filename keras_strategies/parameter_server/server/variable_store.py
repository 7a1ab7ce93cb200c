"""What one parameter server holds: parts of variables, and which updates they had."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from keras_strategies.errors import PeerError

#: A part's name: the variable's number, and the first of the rows.
Key = tuple[int, int]
#: An update's name: the closure's number, and the number of the update in it.
UpdateId = tuple[int, int]

#: Makes an array of a shape and a dtype, whose numbers are not set yet.
Empty = Callable[[tuple[int, ...], np.dtype[Any]], np.ndarray]

#: Bytes at a multiple of which XLA wants arrays to begin.
ALIGNMENT = 64


@dataclass
class Applied:
    """Which updates have been made, so that each is made once.

    A closure that is run again, because its worker died, sends the same names. Those
    of closures that are done are forgotten.
    """

    steps: dict[int, int] = field(default_factory=dict)
    #: Closures below this number are done.
    done: int = 0
    #: The last request of each process that added something outside of a closure.
    requests: dict[str, int] = field(default_factory=dict)

    def is_new(self, update: UpdateId) -> bool:
        closure, step = update
        return closure >= self.done and self.steps.get(closure, -1) < step

    def add(self, update: UpdateId) -> None:
        closure, step = update
        self.steps[closure] = step

    def is_new_request(self, sender: str, number: int) -> bool:
        """Notes a request; whether it comes for the first time."""
        if self.requests.get(sender, -1) >= number:
            return False
        self.requests[sender] = number
        return True

    def forget_below(self, closure: int) -> None:
        if closure > self.done:
            self.done = closure
            self.steps = {c: s for c, s in self.steps.items() if c >= closure}


class Store:
    """Arrays by their keys, in memory that is updated in place where possible."""

    def __init__(self) -> None:
        self.arrays: dict[Key, np.ndarray] = {}
        self.applied = Applied()
        #: Counts the updates that were made.
        self.version = 0

    def create(self, key: Key, value: np.ndarray) -> None:
        """Begins a part. One that is there stays: requests may come twice."""
        if key not in self.arrays:
            array = np.asarray(value, order="C")
            # What has arrived is a view of the message.
            is_own = array.flags.owndata and array.flags.writeable
            self.arrays[key] = array if is_own else np.array(array)

    def get(self, key: Key) -> np.ndarray:
        """The array of a part.

        Raises:
            RuntimeError: `PeerError` if there is no such part.
        """
        try:
            return self.arrays[key]
        except KeyError:
            raise PeerError(
                f"This parameter server has no part {key}; it holds "
                f"{len(self.arrays)} parts."
            ) from None

    def own(self, key: Key) -> np.ndarray:
        """The array of a part, to be changed in place.

        After an update it may be a framework's memory, which is read-only.
        """
        array = self.get(key)
        if not array.flags.writeable:
            array = self.arrays[key] = np.array(array)
        return array

    def write(self, key: Key, value: np.ndarray, start: int = 0) -> None:
        """Sets consecutive rows of a part, or all of a scalar."""
        array = self.own(key)
        if array.ndim == 0:
            array[...] = value
        else:
            array[start : start + len(value)] = value

    def add(self, key: Key, delta: np.ndarray) -> None:
        """Adds to a part."""
        array = self.own(key)
        if array.dtype == bool:
            array[...] = delta
        else:
            array += delta

    def rows(
        self, key: Key, ids: np.ndarray, count: int, empty: Empty | None = None
    ) -> np.ndarray:
        """Copies of some rows of a part, as `take_rows`."""
        return take_rows(self.get(key), ids, count, empty)

    @property
    def nbytes(self) -> int:
        """int, bytes of all arrays."""
        return sum(array.nbytes for array in self.arrays.values())


def take_rows(
    array: np.ndarray, ids: np.ndarray, count: int, empty: Empty | None = None
) -> np.ndarray:
    """Copies of some rows of an array, with zeros below them.

    Args:
        array: `(n, ...)`.
        ids: integers, `(m,)`, from 0 to n - 1.
        count: int, the rows of the result, at least m.
        empty: makes the array for the result; `empty_aligned` by default.
    """
    found = (empty or empty_aligned)((count, *array.shape[1:]), array.dtype)
    # NumPy takes into a given array without a copy in this mode only.
    array.take(ids, axis=0, out=found[: len(ids)], mode="clip")
    found[len(ids) :] = 0
    return found


def empty_aligned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """An array that XLA takes as it is; one at another address it would copy first."""
    size = dtype.itemsize * math.prod(shape)
    memory = np.empty(size + ALIGNMENT, np.uint8)
    start = -memory.__array_interface__["data"][0] % ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def pad_rows(array: np.ndarray, rows: int) -> np.ndarray:
    """An array with so many rows: zeros below it, or without what is below them."""
    if len(array) >= rows:
        return array[:rows]
    padded = empty_aligned((rows, *array.shape[1:]), array.dtype)
    padded[: len(array)] = array
    padded[len(array) :] = 0
    return padded


def put_rows(array: np.ndarray, ids: np.ndarray, rows: np.ndarray) -> None:
    """Sets some rows of an array.

    NumPy sets rows number by number; taken for one item each, they are copied as
    wholes, which takes a fifth of the time. `put` does less for each than an index.
    """
    rows = np.ascontiguousarray(rows, array.dtype)
    if not array.size or not len(ids) or not array.flags.c_contiguous:
        array[ids] = rows
        return
    item = np.dtype((np.void, array.nbytes // len(array)))
    items = array.reshape(len(array), -1).view(item)[:, 0]
    items.put(ids, rows.reshape(len(ids), -1).view(item), mode="clip")
