"""Snapshot files: format, atomic writes, generations, verification.

A snapshot is a zip archive without compression: `contents.json`, and one NumPy file
`arrays/N.npy` for each array. The archive has a CRC-32 of each member. Nothing in it is
pickled. In `contents.json` an array is `{"array": N}`, a tuple `{"tuple": [...]}`, and
a dict `{"dict": [[key, value], ...]}`; all else is JSON as it is.
"""

from __future__ import annotations

import io
import json
import os
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from keras_strategies.errors import (
    CheckpointError,
    DamagedCheckpointError,
    InvalidTypeError,
)
from keras_strategies.training.saving.atomic_files import atomic_file, flush_folder
from keras_strategies.user_warnings import warn_user

#: Number of snapshots in the directory.
GENERATIONS = 2
_VERSION = 1
_CONTENTS = "contents.json"
_NAME = re.compile(r"snapshot-(\d+)\.zip")


class SnapshotDirectory:
    """The snapshots in a directory, numbered from the oldest.

    Args:
        directory: path of the folder; made when it is first written to.
    """

    def __init__(self, directory: str | os.PathLike[str]):
        self.directory = Path(directory)

    def check_writable(self) -> None:
        """Creates the directory, and removes files of interrupted writes.

        Raises:
            OSError: if nothing can be written there.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        for part in self.directory.glob(".part-*-snapshot-*.zip"):
            part.unlink(missing_ok=True)
        with atomic_file(self.directory / "snapshot-probe.zip") as part:
            part.write_bytes(b"probe")
        (self.directory / "snapshot-probe.zip").unlink()

    def write(self, state: Any) -> Path:
        """Writes the next snapshot, and removes all but the last two.

        Args:
            state: structure of dicts, lists, tuples, numbers, strings and arrays.

        Returns:
            `Path` of the file.

        Raises:
            OSError: if it cannot be written; the earlier snapshots stay.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        found = self._found()
        number = found[-1][0] + 1 if found else 1
        target = self.directory / f"snapshot-{number:08d}.zip"
        with atomic_file(target) as part:
            _write_archive(part, state)
        flush_folder(self.directory)
        for _, old in found[: len(found) + 1 - GENERATIONS]:
            old.unlink(missing_ok=True)
        return target

    def read(self) -> bytes | None:
        """The bytes of the last snapshot that is complete; None without snapshots.

        Raises:
            ValueError: if all snapshots are damaged.
            OSError: if a snapshot cannot be read.
        """
        error: DamagedCheckpointError | None = None
        for _, path in reversed(self._found()):
            data = path.read_bytes()
            try:
                _check_archive(data, path)
            except DamagedCheckpointError as damaged:
                if error is not None:
                    raise DamagedCheckpointError(
                        f"{error.text} So is the snapshot before it, {str(path)!r}. "
                        f"Remove {str(self.directory)!r} to train from the beginning."
                    ) from damaged
                error = damaged
            else:
                if error is not None:
                    warn_user(
                        f"{error.text} Using the snapshot before it, {str(path)!r}."
                    )
                return data
        if error is not None:
            raise DamagedCheckpointError(
                f"{error.text} There is no other snapshot. Remove "
                f"{str(self.directory)!r} to train from the beginning."
            )
        return None

    def _found(self) -> list[tuple[int, Path]]:
        if not self.directory.is_dir():
            return []
        matches = ((_NAME.fullmatch(p.name), p) for p in self.directory.iterdir())
        return sorted((int(match[1]), path) for match, path in matches if match)


def parsed(data: bytes) -> Any:
    """The state in the bytes of a snapshot."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:

        def array(number: int) -> Any:
            with archive.open(f"arrays/{number}.npy") as file:
                return np.lib.format.read_array(file, allow_pickle=False)

        contents = json.loads(archive.read(_CONTENTS))
        if contents["version"] != _VERSION:
            raise CheckpointError(
                f"The snapshot has the format {contents['version']!r}; this version of "
                f"keras_strategies reads {_VERSION}. Use the version that has written "
                "it, or another directory."
            )
        return _decoded(contents["state"], array)


def packed(state: Any) -> bytes:
    """A state as the bytes of a snapshot, which `parsed` reads."""
    file = io.BytesIO()
    _write_archive(file, state)
    return file.getvalue()


def _write_archive(file: Path | IO[bytes], state: Any) -> None:
    arrays: list[Any] = []
    contents = {"version": _VERSION, "state": encoded(state, arrays)}
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(_CONTENTS, json.dumps(contents))
        for i, array in enumerate(arrays):
            with archive.open(f"arrays/{i}.npy", "w", force_zip64=True) as part:
                np.lib.format.write_array(part, array, allow_pickle=False)


def _check_archive(data: bytes, path: Path) -> None:
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            archive.getinfo(_CONTENTS)
            wrong = archive.testzip()
    except (zipfile.BadZipFile, KeyError, EOFError, ValueError, OSError) as error:
        raise DamagedCheckpointError(
            f"Snapshot {str(path)!r} is damaged: {error}."
        ) from error
    if wrong is not None:
        raise DamagedCheckpointError(
            f"Snapshot {str(path)!r} is damaged: {wrong} has a wrong checksum."
        )


def encoded(value: Any, arrays: list[Any], name: str = "") -> Any:
    """A structure as JSON, its arrays appended to a list.

    Raises:
        TypeError: for a value of another kind.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        # Subclasses, such as NumPy's float64, are written as their base.
        return value
    if isinstance(value, Mapping):
        items = [[k, encoded(v, arrays, f"{name}[{k!r}]")] for k, v in value.items()]
        return {"dict": items}
    if isinstance(value, (list, tuple)):
        each = [encoded(v, arrays, f"{name}[{i}]") for i, v in enumerate(value)]
        return each if isinstance(value, list) else {"tuple": each}
    array = _as_array(value)
    if array is None:
        raise InvalidTypeError(
            f"{name} is of type {type(value).__name__}, which a snapshot cannot hold. "
            "Use numbers, strings, NumPy arrays, and lists, tuples and dicts of these."
        )
    arrays.append(array)
    return {"array": len(arrays) - 1}


def _as_array(value: Any) -> Any:
    if not hasattr(value, "__array__") and not hasattr(value, "__array_interface__"):
        return None
    array = np.asarray(value)
    if array.dtype.hasobject:
        return None
    return array if array.dtype.isbuiltin == 1 else array.astype("float32")


def _decoded(value: Any, array: Any) -> Any:
    if isinstance(value, list):
        return [_decoded(each, array) for each in value]
    if not isinstance(value, dict):
        return value
    ((kind, found),) = value.items()
    if kind == "array":
        return array(found)
    if kind == "tuple":
        return tuple(_decoded(each, array) for each in found)
    return {key: _decoded(each, array) for key, each in found}
