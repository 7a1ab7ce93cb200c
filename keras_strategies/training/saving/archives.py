"""Archives: the file format of checkpoints, of `Resume` and of parameter servers.

A zip archive without compression, with a CRC-32 of each member: `contents.json`, and
one NumPy file `arrays/N.npy` for each array. Arrays are written and read one by one.
Nothing in it is pickled. `contents.json` has the kind of the archive, the version of
the format and a structure, in which an array is `{"array": N}`, a tuple
`{"tuple": [...]}`, and a dict `{"dict": [[key, value], ...]}`; all else is JSON as it
is. Of an array with a dtype that NumPy's files do not have, such as bfloat16, the bits
are stored, as unsigned integers: `{"array": N, "dtype": "bfloat16"}`.

A file may come from anywhere, so its sizes are compared before memory is taken: members
are not compressed and together not larger than the file, an array is as large as its
member, and each array is used once. What is read is never larger than the file.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import struct
import tokenize
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from keras_strategies.errors import (
    CheckpointError,
    DamagedCheckpointError,
    InvalidTypeError,
)

_VERSION = 2
_CONTENTS = "contents.json"
#: Bytes of an array that are read at a time.
_PIECE_BYTES = 16 << 20
#: The largest number, or string, of an array.
_MOST_ITEM_BYTES = 1 << 20
# What reading a damaged archive raises: `RecursionError`, of brackets in brackets, is a
# `RuntimeError`.
_ERRORS = (
    zipfile.BadZipFile,
    EOFError,
    LookupError,
    OverflowError,
    RuntimeError,
    TypeError,
    ValueError,
    AttributeError,
    struct.error,
)


@dataclass(frozen=True)
class LazyArray:
    """An array that is read when it is written to an archive.

    Args:
        read: returns the array.
    """

    read: Callable[[], Any]


@dataclass(frozen=True)
class StoredArray:
    """An array in an open archive.

    Args:
        read: reads the array.
        shape: tuple of int.
        dtype: its dtype.
    """

    read: Callable[[], np.ndarray]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


def write_archive(file: Path | IO[bytes], kind: str, state: Any) -> None:
    """Writes an archive.

    Args:
        file: a path, or a file that is open for writing.
        kind: str, what the archive is, such as `"checkpoint"`.
        state: structure of dicts, lists, tuples, numbers, strings, bytes and arrays.

    Raises:
        TypeError: for a value of another kind.
    """
    arrays: list[tuple[dict[str, Any], Any]] = []
    found = _encoded(state, arrays)
    with zipfile.ZipFile(file, "w") as archive:
        for i, (reference, array) in enumerate(arrays):
            value = array.read() if isinstance(array, LazyArray) else array
            with archive.open(f"arrays/{i}.npy", "w", force_zip64=True) as part:
                np.lib.format.write_array(
                    part, _in_numpy(value, reference), allow_pickle=False
                )
        contents = {"kind": kind, "version": _VERSION, "state": found}
        archive.writestr(_CONTENTS, json.dumps(contents))


@contextlib.contextmanager
def open_archive(file: Path | IO[bytes], kind: str, name: str) -> Iterator[Any]:
    """Context manager: the structure in an archive, its arrays as `StoredArray`.

    All sizes and checksums are compared before.

    Args:
        file: a path, or a file that is open for reading.
        kind: str, what the archive should be.
        name: str, how errors name it, such as `"Checkpoint 'a.ckpt'"`.

    Raises:
        DamagedCheckpointError: if it is truncated or modified.
        CheckpointError: if it is of another kind or format.
    """
    with contextlib.ExitStack() as stack:
        with naming_damage(name):
            archive = stack.enter_context(zipfile.ZipFile(file))
            _check_sizes(archive)
            wrong = archive.testzip()
            if wrong is not None:
                raise zipfile.BadZipFile(f"{wrong} has a wrong checksum")
            with _in_member(_CONTENTS):
                contents = json.loads(archive.read(_CONTENTS))
                found = contents.get("kind"), contents.get("version")
        if found != (kind, _VERSION):
            raise CheckpointError(
                f"{name} is of kind {found[0]!r} and format {found[1]!r}; this version "
                f"of keras_strategies reads kind {kind!r} of format {_VERSION} there. "
                "Use the version that has written it, or another path."
            )
        with naming_damage(name), _in_member(_CONTENTS):
            state = _decoded(contents["state"], _StoredArrays(archive, name))
        yield state


def check_stored(value: Any, described: Any) -> None:
    """Raises unless a value of an open archive is the numbers of a variable.

    Args:
        value: the value.
        described: dict of the variable, with its "path" and "shape".
    """
    path, shape = str(described["path"]), tuple(described["shape"])
    is_array = isinstance(value, StoredArray) and value.dtype.names is None
    if not is_array or value.shape != shape or value.dtype.kind in "USMm":
        raise ValueError(f"{path[:80]!r} of shape {str(shape)[:80]} has other values")


def check_value(value: Any, name: str) -> None:
    """Raises `TypeError`, with a name, for a value that no archive can hold."""
    _encoded(value, [], name)


@contextlib.contextmanager
def naming_damage(name: str) -> Iterator[None]:
    """Context manager: errors of damaged contents become `DamagedCheckpointError`.

    Args:
        name: str, how errors name the archive.
    """
    try:
        yield
    except CheckpointError:
        raise
    except (*_ERRORS, OSError) as error:
        # Places outside of the file; other errors are those of the disk.
        if isinstance(error, OSError) and error.errno != errno.EINVAL:
            raise
        raise DamagedCheckpointError(
            f"{name} is damaged or not an archive of keras_strategies: "
            f"{_reason(error)}."
        ) from error


@contextlib.contextmanager
def _in_member(member: str) -> Iterator[None]:
    """Names a member in errors."""
    try:
        yield
    except (CheckpointError, zipfile.BadZipFile):
        raise
    except _ERRORS as error:
        raise zipfile.BadZipFile(f"{member}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    return f"{error} is missing" if isinstance(error, KeyError) else str(error)


def _check_sizes(archive: zipfile.ZipFile) -> None:
    """Raises if reading members takes more memory than the file has bytes."""
    file = archive.fp
    assert file is not None
    size = file.seek(0, os.SEEK_END)
    left = size
    for member in archive.infolist():
        if member.compress_type != zipfile.ZIP_STORED:
            raise zipfile.BadZipFile(
                f"{member.filename} is compressed, to {member.compress_size:,} bytes "
                f"of {member.file_size:,}, which no archive of keras_strategies is"
            )
        left -= member.file_size
        if member.file_size != member.compress_size or left < 0:
            raise zipfile.BadZipFile(
                f"{member.filename} has {member.file_size:,} bytes, the file {size:,}"
            )
    archive.getinfo(_CONTENTS)


def _encoded(
    value: Any, arrays: list[tuple[dict[str, Any], Any]], name: str = ""
) -> Any:
    """A structure as JSON; appends its arrays, with the references to them."""
    if value is None or isinstance(value, (bool, int, float, str)):
        # Subclasses, such as NumPy's float64, are written as their base.
        return value
    if isinstance(value, Mapping):
        items = [[k, _encoded(v, arrays, f"{name}[{k!r}]")] for k, v in value.items()]
        return {"dict": items}
    if isinstance(value, (list, tuple)):
        each = [_encoded(v, arrays, f"{name}[{i}]") for i, v in enumerate(value)]
        return each if isinstance(value, list) else {"tuple": each}
    is_bytes = isinstance(value, bytes)
    if not is_bytes and not isinstance(value, LazyArray) and not _is_array(value):
        raise InvalidTypeError(
            f"{name} is of type {type(value).__name__}, which a snapshot cannot hold. "
            "Use numbers, strings, NumPy arrays, and lists, tuples and dicts of these."
        )
    reference = {"bytes" if is_bytes else "array": len(arrays)}
    arrays.append((reference, np.frombuffer(value, np.uint8) if is_bytes else value))
    return reference


def _is_array(value: Any) -> bool:
    if not hasattr(value, "__array__") and not hasattr(value, "__array_interface__"):
        return False
    return not np.asarray(value).dtype.hasobject


def _in_numpy(value: Any, reference: dict[str, Any]) -> np.ndarray:
    """An array with a dtype of NumPy; the reference gets its own one."""
    array = np.asarray(value)
    # `isbuiltin` is 0 for some dtypes of NumPy, such as those from pickles.
    if array.dtype.type.__module__ == "numpy":
        return array
    reference["dtype"] = array.dtype.name
    return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")


class _StoredArrays:
    """The arrays of an open archive, by their references in its contents.

    Args:
        archive: the open file.
        name: str, how errors name it.
    """

    def __init__(self, archive: zipfile.ZipFile, name: str):
        self._archive = archive
        self._name = name
        self._found: set[int] = set()

    def at(self, reference: dict[str, Any], key: str) -> StoredArray:
        """An array, whose header is compared with the size of its member."""
        number = reference[key]
        if not isinstance(number, int) or number in self._found:
            raise ValueError(f"array {str(number)[:20]} is not a number, or used twice")
        self._found.add(number)
        member = f"arrays/{number}.npy"
        with _in_member(member), self._archive.open(member) as file:
            shape, is_fortran, dtype = _header(file)
            found = self._archive.getinfo(member).file_size - file.tell()
            nbytes = math.prod(shape) * dtype.itemsize
            if nbytes != found:
                raise ValueError(
                    f"its header says {nbytes:,} bytes, of shape {shape} and dtype "
                    f"{dtype}, and there are {found:,}"
                )
            own_dtype = _own_dtype(reference.get("dtype"), dtype)
        order: Any = "F" if is_fortran else "C"

        def read() -> np.ndarray:
            with (
                naming_damage(self._name),
                _in_member(member),
                self._archive.open(member) as file,
            ):
                _header(file)
                buffer = _bytes_of(file, nbytes)
                return np.ndarray(shape, dtype, buffer, order=order).view(own_dtype)

        return StoredArray(read, shape, own_dtype)


def _bytes_of(file: IO[bytes], count: int) -> np.ndarray:
    buffer = np.empty(count, np.uint8)
    for start in range(0, count, _PIECE_BYTES):
        piece = file.read(min(_PIECE_BYTES, count - start))
        buffer[start : start + len(piece)] = np.frombuffer(piece, np.uint8)
    return buffer


def _header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Reads the header of a NumPy file: shape, whether in Fortran's order, dtype."""
    version = np.lib.format.read_magic(file)
    readers = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    try:
        shape, is_fortran, dtype = readers[version](file)
    except (MemoryError, SyntaxError, tokenize.TokenError) as error:
        # A header is Python, of which the parser refuses brackets in brackets.
        raise ValueError(f"its header cannot be read ({error})") from error
    if (
        dtype.hasobject
        or dtype.itemsize > _MOST_ITEM_BYTES
        or min(shape, default=0) < 0
    ):
        raise ValueError(f"its header has shape {shape} and dtype {dtype}")
    # Raises for shapes that no array can have, such as of 100 dimensions.
    np.broadcast_to(np.empty((), dtype), shape)
    return shape, is_fortran, dtype


def _own_dtype(name: Any, stored: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype of an array, of which NumPy's file has the bits."""
    if name is None:
        return stored
    import ml_dtypes

    kind = getattr(ml_dtypes, name, None) if isinstance(name, str) else None
    if not isinstance(kind, type) or not issubclass(kind, np.generic):
        raise ValueError(f"there is no dtype {str(name)[:40]!r}")
    own: np.dtype[Any] = np.dtype(kind)
    if stored != np.dtype(f"u{own.itemsize}"):
        raise ValueError(f"its bits are of dtype {stored}, not of {own}")
    return own


def _decoded(value: Any, arrays: _StoredArrays) -> Any:
    if isinstance(value, list):
        return [_decoded(each, arrays) for each in value]
    if not isinstance(value, dict):
        return value
    if "array" in value:
        return arrays.at(value, "array")
    if "bytes" in value:
        return arrays.at(value, "bytes").read().tobytes()
    ((kind, found),) = value.items()
    if kind == "tuple":
        return tuple(_decoded(each, arrays) for each in found)
    if kind != "dict":
        raise ValueError(f"there is no structure {kind[:40]!r}")
    return {key: _decoded(each, arrays) for key, each in found}


def with_arrays(state: Any) -> Any:
    """A structure of `open_archive` with all arrays read."""
    if isinstance(state, StoredArray):
        return state.read()
    if isinstance(state, dict):
        return {key: with_arrays(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(map(with_arrays, state))
    return state
