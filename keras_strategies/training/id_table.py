"""Rows of ids: which id has which row of a table, how often and when it was seen.

An array of *entries* has it all, so that it is saved as a variable is. The first
entries are those of the table's rows; the row 0 is that of all ids without one. The
others are *candidates*, which have not been seen often enough. NumPy alone computes
it: the result is the same on every backend.
"""

from __future__ import annotations

import hashlib
import zlib
from typing import Any

import keras
import numpy as np

from keras_strategies.errors import InvalidTypeError

#: Columns of an entry: both halves of its id, times seen (0: free), last round.
_SEEN, _LAST = 2, 3
_MOST = 2**31 - 1


def keys_of(ids: Any) -> tuple[np.ndarray, np.ndarray]:
    """Different ids as int64, and the place of each given one among them.

    Strings become 64 bits of their BLAKE2 hash, of which two of ten million are equal
    with a probability of 3 in a million.

    Args:
        ids: integers, `str` or `bytes`, an array or tensor of any shape.
    """
    array = np.asarray(
        ids if isinstance(ids, list | tuple | str | bytes) else _host(ids)
    )
    unique, inverse = np.unique(array, return_inverse=True)
    if unique.dtype.kind in "iu":
        keys = unique.astype(np.int64)
    elif unique.dtype.kind in "OSU":
        keys = np.array([_hash(each) for each in unique], np.int64)
    else:
        raise InvalidTypeError(
            f"Ids are integers or strings. Received dtype {array.dtype}."
        )
    return keys, inverse.reshape(array.shape)


def _host(ids: Any) -> Any:
    return ids if isinstance(ids, np.ndarray) else keras.ops.convert_to_numpy(ids)


def _hash(text: Any) -> int:
    if not isinstance(text, str | bytes):
        raise InvalidTypeError(
            f"Ids are integers or strings. Received {text!r} of {type(text)}."
        )
    content = text.encode() if isinstance(text, str) else text
    digest = hashlib.blake2b(content, digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


class IdTable:
    """Entries of ids, changed in place.

    A round takes time for its ids, and from time to time for all: `_levels` are sorted
    ids with their places, all but the newest ones, and these.

    Args:
        entries: int32 `(n, 4)`.
        state: int32 `(3,)`: the number of rounds, a checksum of all of them, and the
            number of batches of `fit` among them.
        rows: int, entries of rows of the table.
    """

    def __init__(self, entries: np.ndarray, state: np.ndarray, rows: int):
        self.entries = entries
        self.state = state
        self.rows = rows
        self._sort()

    def copy(self) -> IdTable:
        """A table with entries of its own."""
        return IdTable(self.entries.copy(), self.state.copy(), self.rows)

    def _sort(self) -> None:
        is_used = self.entries[:, _SEEN] > 0
        used = np.flatnonzero(is_used)
        keys = _joined(self.entries[used])
        order = np.argsort(keys)
        none = np.empty(0, np.int64)
        self._levels = [(keys[order], used[order]), (none, none)]
        free = np.flatnonzero(~is_used)
        self._free = free[(free > 0) & (free < self.rows)]
        self._free_candidates = free[free >= self.rows]

    def _find(self, keys: np.ndarray) -> np.ndarray:
        """The entry of each key; -1 for none."""
        found = np.full(len(keys), -1)
        for known, places in self._levels:
            at, is_there = _search(known, keys)
            found[is_there] = places[at[is_there]]
        return found

    def _put(self, keys: np.ndarray, places: np.ndarray) -> None:
        """Sets the entries of keys, with or without one before."""
        is_new = np.ones(len(keys), bool)
        for known, own in self._levels:
            at, is_there = _search(known, keys)
            own[at[is_there]] = places[is_there]
            is_new &= ~is_there
        keys, places = keys[is_new], places[is_new]
        order = np.argsort(keys)
        (old, _), (newest, own) = self._levels
        at = np.searchsorted(newest, keys[order])
        newest = np.insert(newest, at, keys[order])
        self._levels[1] = newest, np.insert(own, at, places[order])
        if len(newest) > 1024 + len(old) // 8:
            self._sort()

    def rows_of(self, keys: np.ndarray) -> np.ndarray:
        """The row of each key; 0 for those without one."""
        places = self._find(keys)
        return np.where(places < self.rows, places, 0).clip(min=0).astype(np.int32)

    @property
    def used(self) -> tuple[np.ndarray, np.ndarray]:
        """The rows in use, and their ids."""
        rows = np.flatnonzero(self.entries[: self.rows, _SEEN])
        return rows, _joined(self.entries[rows])

    def see(self, keys: np.ndarray, counts: np.ndarray, admit: int) -> tuple[int, int]:
        """A round of ids; those that have been seen often enough get free rows.

        Args:
            keys: int64, different ones.
            counts: how often each was seen in this round.
            admit: int, times that it must have been seen.

        Returns:
            the numbers of new rows, and of ids for which no row is free.
        """
        self._begin_round(keys, counts)
        entries, now = self.entries, self.state[0]
        places = self._find(keys)
        known = places >= 0
        seen = np.where(known, entries[places, _SEEN].astype(np.int64), 0) + counts
        seen = seen.clip(max=_MOST)
        has_row = known & (places < self.rows)
        entries[places[known], _SEEN] = seen[known]
        entries[places[known], _LAST] = now
        wanted = np.flatnonzero(~has_row & (seen >= admit))
        # The most frequent ones first, where rows are scarce.
        wanted = wanted[np.lexsort((keys[wanted], -seen[wanted]))]
        refused = max(0, len(wanted) - len(self._free))
        wanted = wanted[: len(self._free)]
        rows, self._free = np.split(self._free, [len(wanted)])
        left = np.sort(places[wanted][known[wanted]])
        entries[left] = 0
        at = np.searchsorted(self._free_candidates, left)
        self._free_candidates = np.insert(self._free_candidates, at, left)
        entries[rows] = _split(keys[wanted], seen[wanted], now)
        self._put(keys[wanted], rows)
        waiting = ~known
        waiting[wanted] = False
        self._add_candidates(_split(keys[waiting], seen[waiting], now))
        return len(rows), refused

    def _add_candidates(self, new: np.ndarray) -> None:
        """Adds candidates. Where they are too many, a quarter is free afterwards.

        Those that were not seen for longest make room.
        """
        area = self.entries[self.rows :]
        if len(new) <= len(self._free_candidates):
            places, self._free_candidates = np.split(self._free_candidates, [len(new)])
            self.entries[places] = new
            self._put(_joined(new), places)
        elif len(area):
            every = np.concatenate([area[area[:, _SEEN] > 0], new])
            order = np.lexsort((_joined(every), -every[:, _SEEN], -every[:, _LAST]))
            every = every[order[: len(area) - len(area) // 4]]
            area[: len(every)] = every
            area[len(every) :] = 0
            self._sort()

    def expire(self, unseen: int | None, fewer_than: int | None) -> np.ndarray:
        """Frees rows and drops candidates; returns the rows.

        Args:
            unseen: rounds without the id; None for any number.
            fewer_than: times that it has been seen; None for any number.
        """
        entries = self.entries
        gone = np.zeros(len(entries), bool)
        if unseen is not None:
            gone |= self.state[0] - entries[:, _LAST] >= unseen
        if fewer_than is not None:
            gone[: self.rows] |= entries[: self.rows, _SEEN] < fewer_than
        gone &= entries[:, _SEEN] > 0
        places = np.flatnonzero(gone)
        entries[places] = 0
        self._note(places)
        self._sort()
        return places[places < self.rows]

    def grown(self, rows: int) -> IdTable:
        """A table with more rows, and as many more candidates, if it has them."""
        has_candidates = len(self.entries) > self.rows
        entries = np.zeros((rows * (2 if has_candidates else 1), 4), np.int32)
        entries[: self.rows] = self.entries[: self.rows]
        candidates = self.entries[self.rows :]
        entries[rows : rows + len(candidates)] = candidates
        return IdTable(entries, self.state.copy(), rows)

    def _begin_round(self, *arrays: np.ndarray) -> None:
        self.state[0] += 1
        self._note(*arrays)

    def _note(self, *arrays: np.ndarray) -> None:
        summed = int(self.state[1]) & 0xFFFFFFFF
        for array in arrays:
            summed = zlib.crc32(array.astype(np.int64).tobytes(), summed)
        self.state[1] = np.uint32(summed).astype(np.int32)


def _search(known: np.ndarray, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Places of keys among known, sorted ones, and whether each is there."""
    if not len(known):
        return np.zeros(len(keys), np.int64), np.zeros(len(keys), bool)
    at = np.searchsorted(known, keys).clip(max=len(known) - 1)
    return at, known[at] == keys


def _joined(entries: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(entries[:, :2]).view(np.int64).reshape(-1)


def _split(keys: np.ndarray, seen: np.ndarray, now: Any) -> np.ndarray:
    entries = np.empty((len(keys), 4), np.int32)
    entries[:, :2] = np.ascontiguousarray(keys).view(np.int32).reshape(-1, 2)
    entries[:, _SEEN], entries[:, _LAST] = seen, now
    return entries
