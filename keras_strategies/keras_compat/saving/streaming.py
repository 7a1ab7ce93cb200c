"""Files of variables that are too large for the memory of one process."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator
from typing import Any

import h5py
import numpy as np

from keras_strategies.errors import InvalidArgumentError
from keras_strategies.keras_compat import patching
from keras_strategies.keras_compat.saving.archive_entries import ArchiveEntry
from keras_strategies.keras_compat.strategy_attribute import strategy_of
from keras_strategies.keras_compat.variables.hosted_variables import is_streamed

_PIECE_BYTES = 32 << 20


class StoredRows:
    """A large array of a file, which is read in pieces.

    Args:
        dataset: the `h5py.Dataset`.
    """

    def __init__(self, dataset: Any):
        self._dataset = dataset
        self.shape = tuple(dataset.shape)
        self.dtype = np.dtype(dataset.dtype)
        if dataset.attrs.get("dtype") == "bfloat16":
            # HDF5 has no such dtype; Keras stores the bytes.
            self.dtype = _bfloat16()

    def pieces(self) -> Iterator[tuple[int, np.ndarray]]:
        """Pairs of the first row and consecutive rows."""
        row = max(1, math.prod(self.shape[1:]) * self.dtype.itemsize)
        step = max(1, _PIECE_BYTES // row)
        for start in range(0, self.shape[0], step):
            rows = self._dataset[start : start + step]
            yield start, rows if rows.dtype == self.dtype else rows.view(self.dtype)

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        found = np.concatenate([rows for _, rows in self.pieces()])
        return found if dtype is None else found.astype(dtype)


class _Loading(threading.local):
    # Whether the object that is being loaded has hosted variables.
    is_hosted = False


_loading = _Loading()


def streamed_files() -> contextlib.AbstractContextManager[None]:
    """Streams large variables to and from files.

    Those on parameter servers are read and written in pieces. A file of variables in
    shards is not read into memory, nor made there: a process may hold a part of it.
    """
    return patching.installed_while("streaming")


def write_variable(original: Any, self: Any, key: str, value: Any) -> None:
    if not is_streamed(value):
        original(self, key, value)
        return
    if not self._h5_entry_initialized:
        self._create_h5_group(self._h5_entry_path)
    _write(self._h5_entry_group, key, value)


def write_sharded(original: Any, self: Any, key: str, value: Any) -> None:
    if not is_streamed(value):
        original(self, key, value)
        return
    size = _nbytes(value)
    if size > self.max_shard_size:
        raise InvalidArgumentError(
            f"Variable {value.path!r} has {size / 1024**3:.3f} GB, more than "
            f"`max_shard_size`, {self.max_shard_size / 1024**3:.3f} GB. Raise "
            "`max_shard_size`, or save without it: the file is written piece by piece."
        )
    # Keras registers the variable with an empty array, which is then replaced.
    self.total_shard_size += size
    self.current_shard_size += size
    original(self, key, np.zeros((0,), "float32"))
    del self._h5_entry_group[key]
    _write(self._h5_entry_group, key, value)


def read_variable(original: Any, self: Any, key: str) -> Any:
    from keras.src.saving import saving_lib

    if _loading.is_hosted:
        dataset = saving_lib.safe_get_h5_dataset(self._h5_entry_group, key)
        if dataset.ndim and dataset.nbytes > _PIECE_BYTES:
            return StoredRows(dataset)
    return original(self, key)


def load_state(original: Any, saveable: Any, *args: Any, **kwargs: Any) -> None:
    variables = getattr(saveable, "variables", ())
    with _loads(any(map(is_streamed, variables))):
        original(saveable, *args, **kwargs)


class _InTheArchive(Exception):
    """Makes Keras open the file of weights in the archive: `open_file`."""


def memory_suffices(original: Any, model: Any) -> bool:
    if any(is_streamed(v) or _is_of_mesh(v) for v in model.variables):
        raise _InTheArchive
    return bool(original(model))


def open_file(original: Any, self: Any, path_or_io: Any, mode: Any = None) -> Any:
    mode = mode or self.mode
    entry = None
    if self.archive is not None:
        opened = ArchiveEntry.new if mode == "w" else ArchiveEntry.existing
        entry = opened(self.archive, str(path_or_io))
    if entry is None:
        return original(self, path_or_io, mode)
    self.io_file = entry
    return h5py.File(entry, mode)


def close_file(original: Any, self: Any) -> None:
    if not isinstance(self.io_file, ArchiveEntry):
        original(self)
        return
    with self.io_file as entry:
        try:
            self.h5_file.close()
        finally:
            # h5py replaces that of a full disk by another one.
            if entry.error is not None:
                raise entry.error
        # After an error Keras has removed the archive.
        if self.mode == "w" and self.archive is not None:
            entry.add_to(self.archive)


def _is_of_mesh(variable: Any) -> bool:
    """Whether a variable was made by a strategy that shards."""
    strategy = strategy_of(variable)
    return strategy is not None and strategy.placement.mesh is not None


def save_slots(original: Any, self: Any, store: Any) -> None:
    if not any(map(is_streamed, self.variables)):
        original(self, store)
        return
    for i, variable in enumerate(self.variables):
        store[str(i)] = variable if is_streamed(variable) else variable.numpy()


@contextlib.contextmanager
def _loads(is_hosted: bool) -> Iterator[None]:
    previous, _loading.is_hosted = _loading.is_hosted, is_hosted
    try:
        yield
    finally:
        _loading.is_hosted = previous


def _write(group: Any, key: str, variable: Any) -> None:
    is_bfloat16 = variable._dtype == "bfloat16"
    dtype = np.dtype("V2") if is_bfloat16 else np.dtype(variable._dtype)
    dataset = group.create_dataset(key, shape=tuple(variable.shape), dtype=dtype)
    if is_bfloat16:
        dataset.attrs["dtype"] = "bfloat16"
    for start, rows in variable.pieces():
        dataset[start : start + len(rows)] = rows.view(dtype)


def _nbytes(variable: Any) -> int:
    dtype = _bfloat16() if variable._dtype == "bfloat16" else np.dtype(variable._dtype)
    return math.prod(variable.shape) * dtype.itemsize


def _bfloat16() -> np.dtype[Any]:
    import ml_dtypes

    return np.dtype(ml_dtypes.bfloat16)
