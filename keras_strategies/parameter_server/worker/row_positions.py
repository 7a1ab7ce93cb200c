"""Looked-up rows of a table, and the position of each lookup among them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_strategies.errors import InvalidArgumentError

_MOST_INT32 = np.iinfo(np.int32).max


class RowPositions:
    """Unique rows of lookups, and the position of each lookup among them."""

    #: Rows of a table per id up to which a position of each row is worth its memory.
    _ROWS_PER_ID = 64

    def __init__(self) -> None:
        # Position of each row of a table; stale for rows that are not looked up.
        self._positions = np.empty(0, np.int32)

    def find(
        self, wanted: Sequence[np.ndarray], rows: int
    ) -> tuple[np.ndarray, list[np.ndarray]]:
        """Unique sorted ids, and the positions of the wanted ones among them.

        Args:
            wanted: ids from 0 to `rows - 1`, int64, `(n,)` each.
            rows: int, rows of the table.

        Returns:
            Ids, int64, and positions for each of the wanted arrays, int32.
        """
        if not wanted:
            return np.empty(0, np.int64), []
        joined = wanted[0] if len(wanted) == 1 else np.concatenate(wanted)
        ends = np.cumsum([len(each) for each in wanted])[:-1]
        if rows > self._ROWS_PER_ID * len(joined):
            found, where = np.unique(joined, return_inverse=True)
            return found, np.split(where.astype(np.int32), ends)
        # Sorting int32 takes half the time of int64.
        ordered = np.sort(joined.astype(np.int32) if rows <= _MOST_INT32 else joined)
        is_first = np.ones(len(ordered), bool)
        np.not_equal(ordered[1:], ordered[:-1], out=is_first[1:])
        found = ordered[is_first].astype(np.int64)
        if len(self._positions) < rows:
            self._positions = np.empty(rows, np.int32)
        self._positions[found] = np.arange(len(found), dtype=np.int32)
        return found, np.split(self._positions[joined], ends)


def _wrapped(ids: np.ndarray, rows: int) -> np.ndarray:
    """Ids with negative ones counted from the end, as in Keras."""
    flat = ids.astype(np.int64)
    return np.where(flat < 0, flat + rows, flat) if (flat < 0).any() else flat


def validate_ids(ids: np.ndarray, rows: int, table: Any) -> np.ndarray:
    """Flat non-negative ids, `(n,)`.

    Raises:
        ValueError: `InvalidArgumentError` for an id out of range.
    """
    flat = _wrapped(ids.reshape(-1), rows)
    if len(flat) and (flat.min() < 0 or flat.max() >= rows):
        wrong = int(flat[(flat < 0) | (flat >= rows)][0])
        raise InvalidArgumentError(
            f"Row {wrong} of {table.path!r} was looked up, which has {rows} rows. "
            f"Ids must be from 0 to {rows - 1}."
        )
    return flat
