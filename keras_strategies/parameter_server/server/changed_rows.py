"""Rows that have changed since the last snapshot, and copy on write for the next one.

A snapshot has the rows of one moment, and a thread copies them while the server goes on
with updates. Before a row is updated that the snapshot still needs, it is copied.
These copies are written with the next piece, so they take little memory: a row that is
updated is copied once for each snapshot, and a forked process would copy a page.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from keras_strategies.parameter_server.wire.step_messages import Key

#: Marks of a row: changed since the last snapshot; to be copied for the present one.
_CHANGED, _PENDING = 1, 2
#: Bytes that are copied at a time, while an update would wait.
_PIECE_BYTES = 1 << 20


class ShardPiece(NamedTuple):
    """Some rows of a shard.

    Args:
        key: the shard.
        start: int, the first row.
        ids: `(n,)`, the rows counted from `start`; None for consecutive ones.
        rows: `(n, m)`, the bytes of each row.
    """

    key: Key
    start: int
    ids: np.ndarray | None
    rows: np.ndarray


class _Pending(NamedTuple):
    """A shard of the present snapshot: bytes of its rows, and their marks."""

    rows: np.ndarray
    marks: np.ndarray


def bytes_of_rows(array: np.ndarray) -> np.ndarray:
    """The memory of an array as `(rows, bytes)`; a scalar has one row."""
    rows = len(array) if array.ndim else 1
    if not array.size:
        return np.empty((rows, 0), np.uint8)
    return np.ascontiguousarray(array).reshape(rows, -1).view(np.uint8)


class ChangedRows:
    """Marks of changed rows, and the copies of the snapshot that is being written.

    One thread changes shards, another one calls `pieces`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # A shard without marks was created since the last snapshot.
        self._marks: dict[Key, np.ndarray] = {}
        # Shards of which all rows are marked as changed.
        self._changed: set[Key] = set()
        self._pending: dict[Key, _Pending] = {}
        self._copies: list[ShardPiece] = []

    def before_change(self, key: Key, rows: slice | np.ndarray | None = None) -> None:
        """Copies what the present snapshot needs, before memory is changed.

        Args:
            key: the shard.
            rows: those that will change; None for all.
        """
        if key in self._changed and key not in self._pending:
            return
        with self._lock:
            marks = self._marks.get(key)
            if marks is None:
                return
            index = slice(None) if rows is None else rows
            pending = self._pending.get(key)
            if pending is not None:
                self._copy(key, pending, index)
            marks[index] = _CHANGED
        if rows is None:
            self._changed.add(key)

    def _copy(self, key: Key, pending: _Pending, rows: slice | np.ndarray) -> None:
        needed = np.flatnonzero(pending.marks[rows] & _PENDING)
        if isinstance(rows, np.ndarray):
            needed = rows[needed]
        elif rows.start:
            needed += rows.start
        if len(needed):
            copies = pending.rows.take(needed, axis=0)
            self._copies.append(ShardPiece(key, 0, needed, copies))

    def replaced(self, key: Key) -> None:
        """Notes that a shard has other memory: the earlier one remains as it was."""
        if key in self._changed:
            return
        with self._lock:
            if key in self._marks:
                self._marks[key] |= _CHANGED
                self._changed.add(key)

    def forget(self, key: Key) -> None:
        """Notes that a shard was deleted, or is another one."""
        self._marks.pop(key, None)
        self._changed.discard(key)

    def changed_bytes(self, arrays: Mapping[Key, np.ndarray]) -> int:
        """int, bytes of all rows that have changed."""
        found = 0
        for key, array in arrays.items():
            marks = self._marks.get(key)
            if marks is None:
                found += array.nbytes
            elif len(marks):
                changed = int(np.count_nonzero(marks.view(bool)))
                found += changed * (array.nbytes // len(marks))
        return found

    def begin(self, arrays: Mapping[Key, np.ndarray], is_full: bool) -> None:
        """Begins a snapshot of the present values, whose rows `pieces` returns.

        Args:
            arrays: all shards.
            is_full: bool, whether it has all rows, not only the changed ones. After an
                incomplete snapshot it must be True.
        """
        marks = {
            key: self._pending_marks(key, array, is_full)
            for key, array in arrays.items()
        }
        with self._lock:
            self._marks, self._copies = marks, []
            self._changed.clear()
            self._pending = {
                key: _Pending(bytes_of_rows(array), marks[key])
                for key, array in arrays.items()
                if marks[key].view(bool).any()
            }

    def _pending_marks(self, key: Key, array: np.ndarray, is_full: bool) -> np.ndarray:
        marks = self._marks.get(key)
        if marks is None or is_full:
            rows = len(array) if array.ndim else 1
            return np.full(rows, _PENDING, np.uint8)
        marks *= _PENDING
        return marks

    def end(self) -> None:
        """Gives up the rows of a snapshot that is not complete."""
        with self._lock:
            self._pending, self._copies = {}, []

    def pieces(self) -> Iterator[ShardPiece]:
        """The rows of the snapshot, each once."""
        for key, pending in list(self._pending.items()):
            rows = len(pending.rows)
            step = max(1, _PIECE_BYTES // max(1, pending.rows.shape[1]))
            for start in range(0, rows, step):
                with self._lock:
                    piece = _take(key, pending, start, min(start + step, rows))
                    copies, self._copies = self._copies, []
                yield from copies
                if piece is not None:
                    yield piece
            with self._lock:
                self._pending.pop(key, None)
        yield from self._copies


def _take(key: Key, pending: _Pending, start: int, stop: int) -> ShardPiece | None:
    """Copies some rows of a shard, as far as they have not been copied."""
    marks = pending.marks[start:stop]
    ids = np.flatnonzero(marks & _PENDING)
    if not len(ids):
        return None
    marks &= _CHANGED
    rows = pending.rows[start:stop]
    if len(ids) == stop - start:
        return ShardPiece(key, start, None, rows.copy())
    return ShardPiece(key, start, ids.astype(np.uint32), rows.take(ids, axis=0))
