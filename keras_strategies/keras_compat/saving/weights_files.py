"""Damaged files of weights: their names and sizes."""

from __future__ import annotations

import contextlib
import json
import os
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
