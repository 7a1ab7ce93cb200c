"""Checksums of a few rows of arrays, by which workers compare their data."""

from __future__ import annotations

from typing import Any

import numpy as np

from keras_strategies.communication.checksums import checksum
from keras_strategies.input.arrays import ArrayDataset
from keras_strategies.input.batches import (
    as_numpy,
    is_array,
    loaded,
    named_leaves,
    shape_of,
)
from keras_strategies.input.distributed_dataset import DistributedDataset

# Rows that are read of each array: the first, the last, and others in equal distances.
_ROWS = 16
# Bytes that are read of each row, at most, in equal distances.
_ROW_BYTES = 4096
# Types whose rows can be read without a copy of the others.
_FRAMES = ("DataFrame", "Series")


def sampled_checksums(structure: Any, name: str) -> dict[str, int]:
    """Checksums of some rows of each array in a structure.

    The cost is the same for arrays of all sizes: of each array 16 rows are read, the
    first and the last among them, and of each row 4 KiB at most. Equal checksums do not
    prove that arrays are equal: values that differ in few other rows are not found.

    Args:
        structure: array, or structure of arrays, of shape `(rows, ...)`; an
            `ArrayDataset`, or a `DataLoader` of a `TensorDataset`. Other leaves are
            left out.
        name: str, of the structure in expressions such as `x['left']`.

    Returns:
        dict from the expression of each array to its checksum.
    """
    leaves = named_leaves(_arrays_of(structure), name)
    found = {leaf: _of_rows(value) for leaf, value in leaves.items()}
    return {leaf: each for leaf, each in found.items() if each is not None}


def _arrays_of(value: Any) -> Any:
    """The arrays of a dataset that all workers have; other input unchanged."""
    if isinstance(value, ArrayDataset):
        return value.arrays
    if isinstance(value, DistributedDataset):
        return _arrays_of(value.feed.source().given) if value.feed.is_global else None
    torch = loaded("torch")
    if torch is None or not isinstance(value, torch.utils.data.DataLoader):
        return value
    dataset = value.dataset
    is_of_arrays = isinstance(dataset, torch.utils.data.TensorDataset)
    return dataset.tensors if is_of_arrays else None


def _of_rows(array: Any) -> int | None:
    """The checksum of sampled rows of an array; None for another value."""
    if type(array).__name__ in _FRAMES:
        take = array.iloc
    elif is_array(array) and not _is_sparse(array):
        take = array
    else:
        return None
    shape = shape_of(array)
    if not shape or not shape[0]:
        return None
    rows = shape[0]
    chosen = sorted({i * (rows - 1) // (_ROWS - 1) for i in range(_ROWS)})
    parts = [_bytes_of(take[row : row + 1]) for row in chosen]
    return checksum(np.concatenate(parts))


def _bytes_of(array: Any) -> np.ndarray:
    torch = loaded("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        # NumPy lacks bfloat16 and float8.
        array = array.detach().cpu().contiguous().view(torch.uint8)
    row = as_numpy(array)
    if row.dtype.hasobject:
        # Texts and objects, whose bytes are addresses.
        return np.frombuffer(repr(row.tolist()).encode()[:_ROW_BYTES], np.uint8)
    step = -(-row.nbytes // _ROW_BYTES)
    return np.ascontiguousarray(row.reshape(-1)[::step]).view(np.uint8)


def _is_sparse(array: Any) -> bool:
    tf = loaded("tensorflow")
    return hasattr(array, "toarray") or (
        tf is not None and isinstance(array, (tf.SparseTensor, tf.RaggedTensor))
    )
