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

from keras_strategies.errors import InvalidArgumentError, InvalidTypeError

#: Columns of an entry: both halves of its id, times seen (0: free), last round.
_SEEN, _LAST = 2, 3
_MOST = 2**31 - 1
#: Of splitmix64.
_STEP, _MIX, _MIX_AGAIN = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


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

    Args:
        entries: int32 `(n, 4)`.
        state: int32 `(2,)`: the number of rounds, and a checksum of all of them.
        rows: int, entries of rows of the table.
    """

    def __init__(self, entries: np.ndarray, state: np.ndarray, rows: int):
        self.entries = entries
        self.state = state
        self._rows = rows
        self._sort()

    def _sort(self) -> None:
        used = np.flatnonzero(self.entries[:, _SEEN])
        keys = _joined(self.entries[used])
        order = np.argsort(keys)
        self._keys, self._places = keys[order], used[order]

    def _find(self, keys: np.ndarray) -> np.ndarray:
        """The entry of each key; -1 for none."""
        if not len(self._keys):
            return np.full(len(keys), -1)
        near = np.searchsorted(self._keys, keys).clip(max=len(self._keys) - 1)
        return np.where(self._keys[near] == keys, self._places[near], -1)

    def rows_of(self, keys: np.ndarray) -> np.ndarray:
        """The row of each key; 0 for those without one."""
        places = self._find(keys)
        return np.where(places < self._rows, places, 0).clip(min=0).astype(np.int32)

    @property
    def used(self) -> tuple[np.ndarray, np.ndarray]:
        """The rows in use, and their ids."""
        rows = np.flatnonzero(self.entries[: self._rows, _SEEN])
        return rows, _joined(self.entries[rows])

    def see(
        self, keys: np.ndarray, counts: np.ndarray, admit: int
    ) -> tuple[np.ndarray, np.ndarray, int]:
        """A round of ids; those that have been seen often enough get free rows.

        Args:
            keys: int64, different ones.
            counts: how often each was seen in this round.
            admit: int, times that it must have been seen.

        Returns:
            the new rows and their keys, and the number of ids for which no row is free.
        """
        self.state[0] += 1
        entries, now = self.entries, self.state[0]
        places = self._find(keys)
        known = places >= 0
        seen = np.where(known, entries[places, _SEEN].astype(np.int64), 0) + counts
        seen = seen.clip(max=_MOST)
        has_row = known & (places < self._rows)
        entries[places[known], _SEEN] = seen[known]
        entries[places[known], _LAST] = now
        wanted = np.flatnonzero(~has_row & (seen >= admit))
        # The most frequent ones first, where rows are scarce.
        wanted = wanted[np.lexsort((keys[wanted], -seen[wanted]))]
        free = 1 + np.flatnonzero(entries[1 : self._rows, _SEEN] == 0)
        refused = max(0, len(wanted) - len(free))
        wanted = wanted[: len(free)]
        rows = free[: len(wanted)]
        entries[places[wanted][known[wanted]]] = 0
        entries[rows] = _split(keys[wanted], seen[wanted], now)
        waiting = ~has_row & ~known
        waiting[wanted] = False
        self._replace_candidates(_split(keys[waiting], seen[waiting], now))
        self._end_round(rows)
        return rows, keys[wanted], refused

    def _replace_candidates(self, new: np.ndarray) -> None:
        """Adds candidates; those that were not seen for longest make room."""
        area = self.entries[self._rows :]
        every = np.concatenate([area[area[:, _SEEN] > 0], new])
        order = np.lexsort((_joined(every), -every[:, _SEEN], -every[:, _LAST]))
        every = every[order[: len(area)]]
        area[: len(every)] = every
        area[len(every) :] = 0

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
            gone[: self._rows] |= entries[: self._rows, _SEEN] < fewer_than
        gone &= entries[:, _SEEN] > 0
        places = np.flatnonzero(gone)
        entries[places] = 0
        self._end_round(places)
        return places[places < self._rows]

    def _end_round(self, places: np.ndarray) -> None:
        self._sort()
        summed = zlib.crc32(self._keys.tobytes(), int(self.state[1]) & 0xFFFFFFFF)
        summed = zlib.crc32(places.tobytes(), summed)
        self.state[1] = np.uint32(summed).astype(np.int32)


def _joined(entries: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(entries[:, :2]).view(np.int64).reshape(-1)


def _split(keys: np.ndarray, seen: np.ndarray, now: Any) -> np.ndarray:
    entries = np.empty((len(keys), 4), np.int32)
    entries[:, :2] = np.ascontiguousarray(keys).view(np.int32).reshape(-1, 2)
    entries[:, _SEEN], entries[:, _LAST] = seen, now
    return entries


def initial_rows(initializer: Any, keys: np.ndarray, columns: int) -> np.ndarray:
    """Initial values of rows that follow from their ids and the initializer's seed.

    Args:
        initializer: `RandomUniform`, `RandomNormal` or `Zeros` of Keras.
        keys: int64 `(n,)`.
        columns: int.

    Returns:
        float32 `(n, columns)`.
    """
    names, kind = keras.initializers, type(initializer)
    if kind is names.Zeros:
        return np.zeros((len(keys), columns), np.float32)
    seed = initializer.seed % 2**32
    if kind is names.RandomUniform:
        low, high = initializer.minval, initializer.maxval
        return (low + (high - low) * _uniform(keys, columns, seed)).astype(np.float32)
    # Of Box and Muller.
    size = np.sqrt(-2 * np.log(1 - _uniform(keys, columns, seed)))
    angle = 2 * np.pi * _uniform(keys, columns, seed + 2**32)
    values = initializer.mean + initializer.stddev * size * np.cos(angle)
    return values.astype(np.float32)


def with_seed(initializer: Any) -> Any:
    """The initializer with the seed that it has drawn, which files then have.

    Raises:
        ValueError: if it cannot compute rows from their ids.
    """
    names = keras.initializers
    seed = getattr(initializer, "seed", 0)
    known = (names.Zeros, names.RandomUniform, names.RandomNormal)
    if type(initializer) not in known or not isinstance(seed, int):
        raise InvalidArgumentError(
            "`initializer` computes each row from its id: give RandomUniform or "
            f"RandomNormal with an integer seed, or Zeros. Received: {initializer!r}"
        )
    config = initializer.get_config()
    if "seed" in config:
        config["seed"] = seed
    return type(initializer).from_config(config)


def _uniform(keys: np.ndarray, columns: int, seed: int) -> np.ndarray:
    """Numbers in [0, 1) by splitmix64 of key, column and seed."""
    with np.errstate(over="ignore"):
        start = _mixed(keys.view(np.uint64) ^ _mixed(np.array([seed], np.uint64)))
        steps = np.arange(1, columns + 1, dtype=np.uint64) * np.uint64(_STEP)
        mixed = _mixed(start[:, None] + steps)
    return (mixed >> np.uint64(11)) * 2.0**-53


def _mixed(values: np.ndarray) -> np.ndarray:
    values = values + np.uint64(_STEP)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(_MIX)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(_MIX_AGAIN)
    return values ^ (values >> np.uint64(31))
