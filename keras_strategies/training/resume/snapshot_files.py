"""Snapshot files: archives (`saving/archives.py`), generations, verification."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from keras_strategies.errors import DamagedCheckpointError
from keras_strategies.runtime.state.model_values import in_numpy_dtype
from keras_strategies.training.saving.archives import (
    naming_damage,
    open_archive,
    with_arrays,
    write_archive,
)
from keras_strategies.training.saving.atomic_files import atomic_file, remove_parts
from keras_strategies.user_warnings import warn_user

#: Number of snapshots in the directory.
GENERATIONS = 2
_KIND = "snapshot of fit"
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
        remove_parts(self.directory, "snapshot-*.zip")
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
        found = self._numbered()
        number = found[-1][0] + 1 if found else 1
        target = self.directory / f"snapshot-{number:08d}.zip"
        with atomic_file(target) as part:
            write_archive(part, _KIND, state)
        for _, old in found[: len(found) + 1 - GENERATIONS]:
            old.unlink(missing_ok=True)
        return target

    def read(self, check: Callable[[Any], None] = lambda state: None) -> bytes | None:
        """The bytes of the last snapshot that is complete; None without snapshots.

        Args:
            check: callable of the state, with arrays as `StoredArray`; an error means
                that the snapshot is damaged.

        Raises:
            ValueError: if all snapshots are damaged.
            OSError: if a snapshot cannot be read.
        """
        error: DamagedCheckpointError | None = None
        for _, path in reversed(self._numbered()):
            data = path.read_bytes()
            name = f"Snapshot {str(path)!r}"
            try:
                with (
                    open_archive(io.BytesIO(data), _KIND, name) as state,
                    naming_damage(name),
                ):
                    check(state)
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

    def _numbered(self) -> list[tuple[int, Path]]:
        if not self.directory.is_dir():
            return []
        matches = ((_NAME.fullmatch(p.name), p) for p in self.directory.iterdir())
        return sorted((int(match[1]), path) for match, path in matches if match)


def parsed(data: bytes) -> Any:
    """The state in the bytes of a snapshot.

    Raises:
        ValueError: if it is damaged, or of another format.
    """
    with open_archive(io.BytesIO(data), _KIND, "The snapshot") as state:
        return _portable(with_arrays(state))


def packed(state: Any) -> bytes:
    """A state as the bytes of a snapshot, which `parsed` reads."""
    file = io.BytesIO()
    write_archive(file, _KIND, state)
    return file.getvalue()


def _portable(state: Any) -> Any:
    """A structure with arrays of dtypes that every framework takes."""
    if isinstance(state, np.ndarray):
        return in_numpy_dtype(state)
    if isinstance(state, dict):
        return {key: _portable(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(map(_portable, state))
    return state
