"""NumPy indexing of arrays that are read by rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np


def indexed(index: Any, array: np.ndarray) -> np.ndarray:
    """The part of an array that NumPy indexing selects.

    Args:
        index: any index of NumPy, with tensors and variables in place of arrays.
        array: NumPy array.

    Raises:
        IndexError: as NumPy does.
    """
    return np.asarray(array[_parts(index)])


def indexed_by_rows(
    index: Any, count: int, read_rows: Callable[[np.ndarray], np.ndarray]
) -> np.ndarray | None:
    """As `indexed`, of an array of which only the selected rows are read.

    Args:
        index: as for `indexed`.
        count: int, number of rows of the array.
        read_rows: callable of row numbers, int64 of shape `(n,)`, that returns these
            rows, an array of shape `(n, ...)`.

    Returns:
        NumPy array; None for an index that does not begin with rows, such as a mask.

    Raises:
        IndexError: as NumPy does.
    """
    first, *others = _parts(index) or (None,)
    rows = _rows(first, count)
    if rows is None:
        return None
    numbers, position = rows
    return np.asarray(read_rows(numbers)[(position, *others)])


def _parts(index: Any) -> tuple[Any, ...]:
    return tuple(map(_as_index, index if isinstance(index, tuple) else (index,)))


def _as_index(part: Any) -> Any:
    """A part of an index as NumPy takes it."""
    if isinstance(part, slice):
        return slice(*(_as_index(each) for each in (part.start, part.stop, part.step)))
    if isinstance(part, keras.Variable) or keras.ops.is_tensor(part):
        return keras.ops.convert_to_numpy(part)
    return part


def _rows(part: Any, count: int) -> tuple[np.ndarray, Any] | None:
    """The rows that the first part of an index selects.

    Returns:
        The numbers of the rows, each once, and the index of them that selects the same;
        None for a part that selects other axes, such as a mask.
    """
    if part is None or part is Ellipsis or isinstance(part, (bool, np.bool_)):
        return None
    numbers = np.arange(count)
    if isinstance(part, slice):
        return numbers[part], slice(None)
    chosen = np.asarray(part)
    if chosen.dtype.kind not in "iu":
        return None
    rows, positions = np.unique(numbers[chosen], return_inverse=True)
    # A number is a number: an array of no dimensions would be one to NumPy, too.
    return rows, positions.reshape(chosen.shape) if chosen.shape else 0
