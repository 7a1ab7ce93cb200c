"""What one parameter server holds: parts of variables, and which updates they had."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from keras_strategies.errors import PeerError

#: A part's name: the variable's number, and the first of the rows.
Key = tuple[int, int]
#: An update's name: the closure's number, and the number of the update in it.
UpdateId = tuple[int, int]


@dataclass
class Applied:
    """Which updates have been made, so that each is made once.

    A closure that is run again, because its worker died, sends the same names. Those
    of closures that are done are forgotten.
    """

    steps: dict[int, int] = field(default_factory=dict)
    #: Closures below this number are done.
    done: int = 0

    def is_new(self, update: UpdateId) -> bool:
        closure, step = update
        return closure >= self.done and self.steps.get(closure, -1) < step

    def add(self, update: UpdateId) -> None:
        closure, step = update
        self.steps[closure] = step

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
            self.arrays[key] = np.array(value, order="C")

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

    def write(self, key: Key, value: np.ndarray, start: int = 0) -> None:
        """Sets consecutive rows of a part, or all of a scalar."""
        array = self.get(key)
        if array.ndim == 0:
            array[...] = value
        else:
            array[start : start + len(value)] = value

    def add(self, key: Key, delta: np.ndarray) -> None:
        """Adds to a part."""
        array = self.get(key)
        if array.dtype == bool:
            array[...] = delta
        else:
            array += delta

    def rows(self, key: Key, ids: np.ndarray) -> np.ndarray:
        """Copies of some rows of a part, in the order of the ids."""
        return self.get(key).take(ids, axis=0, mode="clip")

    @property
    def nbytes(self) -> int:
        """int, bytes of all arrays."""
        return sum(array.nbytes for array in self.arrays.values())

    # Snapshots: variables and applied updates in one file, which is there or not.

    def save(self, path: Path, extra: Any) -> None:
        """Writes everything to a file, by renaming a complete one.

        Args:
            path: where to.
            extra: what else the file is to hold.
        """
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        with part.open("wb") as file:
            head = (self.version, self.applied, list(self.arrays), extra)
            pickle.dump(head, file, protocol=5)
            for array in self.arrays.values():
                # As bytes: dtypes such as bfloat16 are not NumPy's own.
                pickle.dump((array.shape, array.dtype), file, protocol=5)
                file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)

    @classmethod
    def load(cls, path: Path) -> tuple[Store, Any]:
        """A store as it was saved, and the extra."""
        store = cls()
        with path.open("rb") as file:
            version, applied, keys, extra = pickle.load(file)
            store.version, store.applied = version, applied
            for key in keys:
                shape, dtype = pickle.load(file)
                array = np.empty(shape, dtype)
                view = array.reshape(-1).view(np.uint8)
                if array.size and file.readinto(view.data) != array.nbytes:
                    raise PeerError(f"The snapshot {path} is cut off.")
                store.arrays[key] = array
        return store, extra


def iterate_rows(
    array: np.ndarray, chunk_bytes: int = 8 << 20
) -> Iterator[tuple[int, np.ndarray]]:
    """An array in pieces of consecutive rows: pairs of the first row and the piece."""
    if array.ndim == 0:
        yield 0, array
        return
    row = max(1, array.nbytes // max(1, len(array)))
    step = max(1, chunk_bytes // row)
    for start in range(0, len(array), step):
        yield start, array[start : start + step]


def pad_rows(array: np.ndarray, rows: int) -> np.ndarray:
    """An array with zeros below it."""
    if len(array) == rows:
        return array
    padded = np.zeros((rows, *array.shape[1:]), array.dtype)
    padded[: len(array)] = array
    return padded


def total_bytes(arrays: Sequence[np.ndarray]) -> int:
    """int, bytes of arrays."""
    return sum(array.nbytes for array in arrays)
