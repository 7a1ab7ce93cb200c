"""Files of `safetensors`, mapped into memory: only the parts that are used are read."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

#: NumPy's names of the dtypes of the format; those of `ml_dtypes` after the standard.
_DTYPES = {
    **{f"F{8 * n}": f"float{8 * n}" for n in (2, 4, 8)},
    **{f"I{8 * n}": f"int{8 * n}" for n in (1, 2, 4, 8)},
    **{f"U{8 * n}": f"uint{8 * n}" for n in (1, 2, 4, 8)},
    "BOOL": "bool",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}


class MappedTensors:
    """A file as `safetensors.safe_open(path, "np")`, with arrays that are mapped.

    `get_tensor` of the original copies an entire tensor, in each process. A device
    needs its shard of it, which `numpy.transpose` and others of a converter leave a
    part of the file.

    Args:
        path: of the file.
        file: what `safe_open` has returned, after it has checked the file.
    """

    def __init__(self, path: Any, file: Any):
        self._path, self._file = Path(path), file
        with self._path.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            self._header = json.loads(stream.read(size))
        self._start = 8 + size

    def __enter__(self) -> MappedTensors:
        self._file.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._file.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def get_tensor(self, name: str) -> Any:
        """The array with a name; the file may not be changed while it is in use."""
        entry = self._header.get(name)
        dtype = _dtype(entry["dtype"]) if entry else None
        if dtype is None or 0 in entry["shape"]:
            return self._file.get_tensor(name)
        first, _ = entry["data_offsets"]
        # "c": writable, as an array of `safe_open`, and the file stays as it is.
        mapped = np.memmap(
            self._path, dtype, "c", self._start + first, tuple(entry["shape"])
        )
        return mapped.view(np.ndarray)


def _dtype(name: str) -> np.dtype[Any] | None:
    import ml_dtypes

    found = _DTYPES.get(name)
    if found is None:
        return None
    return np.dtype(getattr(ml_dtypes, found, found))


class _Replaced:
    """`safetensors.safe_open`, in the blocks of any number of threads."""

    lock = threading.Lock()
    users = 0
    original: Any = None


@contextlib.contextmanager
def mapping_tensors() -> Iterator[None]:
    """A block in which `safetensors.safe_open` maps files, if it is for NumPy."""
    try:
        # keras_hub imports it while it loads the first preset.
        import safetensors as module
    except ImportError:
        yield
        return
    with _Replaced.lock:
        if not _Replaced.users:
            _Replaced.original = module.safe_open
            setattr(module, "safe_open", _safe_open)  # noqa: B010
        _Replaced.users += 1
    try:
        yield
    finally:
        with _Replaced.lock:
            _Replaced.users -= 1
            if not _Replaced.users:
                setattr(module, "safe_open", _Replaced.original)  # noqa: B010


def _safe_open(path: Any, framework: str, *args: Any, **kwargs: Any) -> Any:
    file = _Replaced.original(path, framework, *args, **kwargs)
    return MappedTensors(path, file) if framework in ("np", "numpy") else file
