"""Damaged files of weights: their names and sizes."""

from __future__ import annotations

import contextlib
import json
import os
import struct
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from keras_strategies.errors import DamagedCheckpointError


@contextlib.contextmanager
def damage_named(path: Any) -> Iterator[None]:
    """A context in which weights are read: an error names the file that is damaged.

    The errors of HDF5 and of JSON name none.

    Args:
        path: of a `.weights.h5` file, or of a `.weights.json` index.

    Raises:
        DamagedCheckpointError: if a file is truncated or modified.
    """
    try:
        yield
    except (OSError, ValueError) as error:
        if isinstance(path, str | os.PathLike):
            _check(Path(path), error)
        raise


@contextlib.contextmanager
def safetensors_named() -> Iterator[None]:
    """A context in which `safetensors` are read: an error names the file.

    The error of `safetensors` has neither its name nor its size, that of a truncated
    index of several files no name. Files are read by loops of others, such as the
    converters of keras-hub: the file is a variable of one of the functions that the
    error has left.

    Raises:
        DamagedCheckpointError: if a file is truncated or modified.
    """
    try:
        yield
    except Exception as error:
        if type(error).__name__ == "SafetensorError":
            for file in _files_of(error, ".safetensors"):
                reason = _truncation(file)
                if reason is not None:
                    raise _damaged(f"{str(file)!r}", reason) from error
        elif isinstance(error, json.JSONDecodeError):
            for file in _files_of(error, ".safetensors.index.json"):
                if file.read_text() == error.doc:
                    raise _damaged(f"{str(file)!r}", error) from error
        raise


def _files_of(error: Exception, ending: str) -> Iterator[Path]:
    """Files that are variables of the functions that an error has left."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        for value in list(frame.f_locals.values()):
            if isinstance(value, str | os.PathLike):
                path = Path(os.fspath(value))
                if path.name.endswith(ending) and path.is_file():
                    yield path


def _truncation(file: Path) -> str | None:
    """Why a file of `safetensors` cannot be read; None if it is complete.

    Its first 8 bytes are the length of a header in JSON, which has the places of all
    tensors behind it.
    """
    has = f"it has {file.stat().st_size:,} bytes"
    with open(file, "rb") as stream:
        first = stream.read(8)
        length = struct.unpack("<Q", first)[0] if len(first) == 8 else 0
        header = stream.read(min(length, file.stat().st_size))
    if not length or len(header) < length:
        return f"{has}, fewer than its header"
    try:
        tensors = json.loads(header)
        tensors.pop("__metadata__", None)
        ends = [each["data_offsets"][1] for each in tensors.values()]
    except (ValueError, KeyError, AttributeError) as damage:
        return f"{has}, and its header is not readable ({damage})"
    needed = 8 + length + max(ends, default=0)
    if needed != file.stat().st_size:
        return f"{has}, and its header says {needed:,} bytes"
    return None


def _check(path: Path, error: Exception) -> None:
    files = [path]
    if path.name.endswith(".json") and path.exists():
        try:
            weight_map = json.loads(path.read_text())["weight_map"]
        except (ValueError, KeyError) as damage:
            raise _damaged(f"{str(path)!r}", damage) from error
        listed = [
            each if isinstance(each, list) else [each] for each in weight_map.values()
        ]
        files = [
            path.with_name(name) for name in sorted({n for e in listed for n in e})
        ]
    for file in files:
        reason = _damage(file)
        if reason is not None:
            among = (
                "" if file == path else f", one of {len(files)} files of {path.name!r},"
            )
            raise _damaged(f"{str(file)!r}{among}", reason) from error


def _damage(file: Path) -> Exception | None:
    """Why a file cannot be opened; None if it can, or is missing."""
    import h5py

    if not file.exists() or not file.name.endswith(".h5"):
        return None
    try:
        h5py.File(file).close()
    except OSError as damage:
        return damage
    return None


def _damaged(file: str, reason: Exception | str) -> DamagedCheckpointError:
    return DamagedCheckpointError(
        f"The file of weights {file} is damaged: {reason}. Copy it again, or save the "
        "weights again."
    )
