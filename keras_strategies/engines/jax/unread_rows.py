"""Rows of arrays that are read when they are placed: on each worker its own."""

from __future__ import annotations

from typing import Any

from keras_strategies.keras_compat.models.input_adapters import floatx_type


class UnreadRows:
    """Rows of a NumPy array of `fit`, of which an index reads a part.

    Args:
        array: NumPy array of shape `(samples, ...)`.
        indices: those of the rows: a slice, or an array of int.
    """

    def __init__(self, array: Any, indices: Any):
        if isinstance(indices, slice):
            indices = range(*indices.indices(len(array)))
        self._array, self._indices = array, indices
        self.dtype = floatx_type(array)
        self.shape = (len(indices), *array.shape[1:])

    @property
    def ndim(self) -> int:
        """int, the number of axes."""
        return len(self.shape)

    def __getitem__(self, index: tuple[slice, ...]) -> Any:
        """A part, as one of a NumPy array: a slice of each of the first axes."""
        rows = self._indices[index[0]]
        if isinstance(rows, range):
            rows = slice(rows.start, rows.stop)
        part = self._array[rows][(slice(None), *index[1:])]
        return part.astype(self.dtype, copy=False)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        found = self[(slice(None),)]
        return found if dtype is None else found.astype(dtype)


def is_unread(leaf: Any) -> bool:
    """Whether a leaf of a batch has not been read."""
    return isinstance(leaf, UnreadRows)
