"""Atomic file replacement."""

from __future__ import annotations

import contextlib
import json
import os
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import h5py
import keras
import numpy as np

from keras_strategies.user_warnings import warn_user

_SEEDS = "keras_strategies_seeds"
_SEEDS_FILE = f"{_SEEDS}.json"

# Single-file formats of Keras: models and unsharded weights.
_SINGLE_FILES = (".keras", ".h5", ".hdf5")


@contextlib.contextmanager
def atomic_save(path: Any, seeds: Sequence[Any] = ()) -> Iterator[Any]:
    """Context manager: a temporary path; its file replaces `path` at the end.

    Keras 3.15 truncates an existing file before it writes, so a process that is killed
    meanwhile would leave neither the old nor the new one. Here an interrupted process
    leaves a file `.part-NUMBER-NAME` in the same folder.

    Args:
        path: the argument of `save`. Directories, addresses and other paths that are
            not local files in a format of Keras are written directly.
        seeds: the variables of seed generators, which Keras does not save. They are
            added in an entry that Keras ignores, so it can load the file.
    """
    if not isinstance(path, (str, os.PathLike)):
        yield path
        return
    target = Path(path)
    if target.suffix not in _SINGLE_FILES or "://" in str(path) or target.is_symlink():
        yield path
        return
    with atomic_file(target) as part:
        yield str(part)
        _add_seeds(part, seeds)


@contextlib.contextmanager
def atomic_file(target: Path) -> Iterator[Path]:
    """Context manager: a temporary path; its file replaces `target` at the end.

    The file and its name in the folder are on disk then.
    """
    # The suffix stays, since it determines the format.
    part = target.with_name(f".part-{os.getpid()}-{target.name}")
    try:
        yield part
        _flush(part)
        part.replace(target)
        flush_folder(target.parent)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _add_seeds(part: Path, seeds: Sequence[Any]) -> None:
    states = [keras.ops.convert_to_numpy(seed).tolist() for seed in seeds]
    if not states:
        return
    if part.suffix == ".keras":
        with zipfile.ZipFile(part, "a") as archive:
            archive.writestr(_SEEDS_FILE, json.dumps(states))
    else:
        with h5py.File(part, "a") as file:
            file.attrs[_SEEDS] = json.dumps(states)


def read_seeds(source: Any, seeds: Sequence[Any]) -> None:
    """Restores the states of seed generators that `atomic_save` added to a file.

    Args:
        source: a path to weights, or an open `.keras` file.
        seeds: the variables of seed generators.
    """
    states = _seeds_in(source) if seeds else None
    if states is None:
        return
    if len(states) != len(seeds):
        warn_user(
            f"The file has the states of {len(states)} seed generators and the model "
            f"has {len(seeds)}; they restart from their seeds."
        )
        return
    for seed, state in zip(seeds, states, strict=True):
        seed.assign(np.asarray(state, seed.dtype))


def _seeds_in(source: Any) -> Any:
    if isinstance(source, (str, os.PathLike)):
        path = Path(source)
        if path.suffix not in (".h5", ".keras") or not path.is_file():
            return None
        if path.suffix == ".h5":
            with h5py.File(path, "r") as file:
                text = file.attrs.get(_SEEDS)
            return None if text is None else json.loads(text)
    with zipfile.ZipFile(source, "r") as archive:
        if _SEEDS_FILE not in archive.namelist():
            return None
        return json.loads(archive.read(_SEEDS_FILE))


def _flush(path: Path) -> None:
    """Flushes a file to disk before it is renamed."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def flush_folder(folder: Path) -> None:
    """Flushes new and renamed files of a folder to disk, where the system can.

    Without it, a file that was flushed may be missing after a loss of power.
    """
    with contextlib.suppress(OSError):
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)
