"""Archives: the file format of checkpoints, of `Resume` and of parameter servers.

A zip archive without compression, with a CRC-32 of each member: `contents.json`, and
one NumPy file `arrays/N.npy` for each array. Arrays are written and read one by one.
Nothing in it is pickled. `contents.json` has the kind of the archive, the version of
the format and a structure, in which an array is `{"array": N}`, a tuple
`{"tuple": [...]}`, and a dict `{"dict": [[key, value], ...]}`; all else is JSON as it
is. Of an array with a dtype that NumPy's files do not have, such as bfloat16, the bits
are stored, as unsigned integers: `{"array": N, "dtype": "bfloat16"}`.
"""

from __future__ import annotations

import contextlib
import json
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
# What reading a damaged archive raises.
_ERRORS = (zipfile.BadZipFile, KeyError, EOFError, ValueError, NotImplementedError)


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
    """

    read: Callable[[], np.ndarray]


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

    All checksums are compared before.

    Args:
        file: a path, or a file that is open for reading.
        kind: str, what the archive should be.
        name: str, how errors name it, such as `"Checkpoint 'a.ckpt'"`.

    Raises:
        DamagedCheckpointError: if it is truncated or modified.
        CheckpointError: if it is of another kind or format.
    """
    with contextlib.ExitStack() as stack:
        with _naming(name):
            archive = stack.enter_context(zipfile.ZipFile(file))
            archive.getinfo(_CONTENTS)
            wrong = archive.testzip()
            if wrong is not None:
                raise zipfile.BadZipFile(f"{wrong} has a wrong checksum")
            contents = json.loads(archive.read(_CONTENTS))
        found = contents.get("kind"), contents.get("version")
        if found != (kind, _VERSION):
            raise CheckpointError(
                f"{name} is of kind {found[0]!r} and format {found[1]!r}; this version "
                f"of keras_strategies reads kind {kind!r} of format {_VERSION} there. "
                "Use the version that has written it, or another path."
            )

        def stored(reference: dict[str, Any]) -> StoredArray:
            return StoredArray(lambda: _read_array(archive, reference, name))

        yield _decoded(contents["state"], stored)


def check_value(value: Any, name: str) -> None:
    """Raises `TypeError`, with a name, for a value that no archive can hold."""
    _encoded(value, [], name)


@contextlib.contextmanager
def _naming(name: str) -> Iterator[None]:
    try:
        yield
    except _ERRORS as error:
        raise DamagedCheckpointError(
            f"{name} is damaged or not an archive of keras_strategies: {error}."
        ) from error


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


def _read_array(
    archive: zipfile.ZipFile, reference: dict[str, Any], name: str
) -> np.ndarray:
    number = reference["array"] if "array" in reference else reference["bytes"]
    with _naming(name), archive.open(f"arrays/{number}.npy") as file:
        array: np.ndarray = np.lib.format.read_array(file, allow_pickle=False)
    if "dtype" not in reference:
        return array
    import ml_dtypes

    return array.view(getattr(ml_dtypes, reference["dtype"]))


def _decoded(value: Any, stored: Callable[[dict[str, Any]], StoredArray]) -> Any:
    if isinstance(value, list):
        return [_decoded(each, stored) for each in value]
    if not isinstance(value, dict):
        return value
    if "array" in value:
        return stored(value)
    if "bytes" in value:
        return stored(value).read().tobytes()
    ((kind, found),) = value.items()
    if kind == "tuple":
        return tuple(_decoded(each, stored) for each in found)
    return {key: _decoded(each, stored) for key, each in found}


def with_arrays(state: Any) -> Any:
    """A structure of `open_archive` with all arrays read."""
    if isinstance(state, StoredArray):
        return state.read()
    if isinstance(state, dict):
        return {key: with_arrays(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(map(with_arrays, state))
    return state


def in_float32(array: Any) -> Any:
    """An array, in float32 if NumPy has not got its dtype, such as bfloat16."""
    array = np.asarray(array)
    return array if array.dtype.isbuiltin == 1 else array.astype("float32")
