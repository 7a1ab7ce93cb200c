"""Which rows of a table a batch looks up, and where each lookup finds its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_strategies.errors import InvalidArgumentError


class RowPositions:
    """Finds the rows that lookups touch, and where each lookup's are among them."""

    #: Rows of a table for each id below which all rows are looked through for those
    #: that are asked for. Beyond that, sorting the ids is faster.
    _ROWS_PER_ID = 64

    def __init__(self) -> None:
        # For rows of a table their place; old numbers stay where no row is asked for.
        self._places = np.empty(0, np.int32)

    def find(
        self, wanted: Sequence[np.ndarray], rows: int
    ) -> tuple[np.ndarray, list[np.ndarray]]:
        """Sorted ids without repeats, and where each of the wanted ones is in them.

        Args:
            wanted: ids from 0 to `rows - 1`, int64, `(n,)` each.
            rows: int, the rows of the table.

        Returns:
            Ids, int64, and for each of the wanted arrays places, int32.
        """
        if not wanted:
            return np.empty(0, np.int64), []
        joined = wanted[0] if len(wanted) == 1 else np.concatenate(wanted)
        ends = np.cumsum([len(each) for each in wanted])[:-1]
        if rows > self._ROWS_PER_ID * len(joined):
            found, where = np.unique(joined, return_inverse=True)
            return found, np.split(where.astype(np.int32), ends)
        is_asked = np.zeros(rows, bool)
        is_asked[joined] = True
        found = np.flatnonzero(is_asked)
        if len(self._places) < rows:
            self._places = np.empty(rows, np.int32)
        self._places[found] = np.arange(len(found), dtype=np.int32)
        return found, np.split(self._places[joined], ends)


def _wrapped(ids: np.ndarray, rows: int) -> np.ndarray:
    """Ids as Keras takes them: negative ones count from the end."""
    flat = ids.astype(np.int64)
    return np.where(flat < 0, flat + rows, flat) if (flat < 0).any() else flat


def validate_ids(ids: np.ndarray, rows: int, table: Any) -> np.ndarray:
    """Ids of any shape as Keras takes them, `(n,)`, from 0 to `rows - 1`.

    Raises:
        ValueError: `InvalidArgumentError` if one is of no row.
    """
    flat = _wrapped(ids.reshape(-1), rows)
    if len(flat) and (flat.min() < 0 or flat.max() >= rows):
        wrong = int(flat[(flat < 0) | (flat >= rows)][0])
        raise InvalidArgumentError(
            f"Row {wrong} of {table.path!r} was looked up, which has {rows} rows. "
            f"Ids must be from 0 to {rows - 1}."
        )
    return flat
