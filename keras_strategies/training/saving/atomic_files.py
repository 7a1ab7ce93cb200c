"""Atomic file replacement."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Files of Keras: models, weights, and the index of sharded weights.
_SUFFIXES = (".keras", ".h5", ".hdf5", ".json")
_PART = ".part-"


@contextlib.contextmanager
def atomic_save(path: Any) -> Iterator[Any]:
    """Context manager: a temporary path; its files replace those of `path` at the end.

    Keras 3.15 truncates an existing file before it writes, so a process that is killed
    meanwhile would leave neither the old nor the new one. Here an interrupted process
    leaves a folder `.part-XXXXXXXX` beside the file.

    Args:
        path: the argument of `save`. Directories, addresses and other paths that are
            not local files in a format of Keras are written directly.
    """
    if not isinstance(path, (str, os.PathLike)) or not _is_file(Path(path)):
        yield path
        return
    with atomic_file(Path(path)) as part:
        yield str(part)


def _is_file(path: Path) -> bool:
    """Whether a path is a local file in a format of Keras, or will be one."""
    if path.suffix not in _SUFFIXES or "://" in str(path):
        return False
    return path.is_file() or not path.exists()


@contextlib.contextmanager
def atomic_file(target: Path) -> Iterator[Path]:
    """Context manager: a temporary path; its file replaces `target` at the end.

    All files that are written beside the temporary path are moved, such as those of
    sharded weights, and that with the suffix `.json`, their index, last. They and their
    names are on disk then. A link is followed: the file that it names is replaced, and
    keeps its permissions. After an error the earlier file is as it was.

    The path is in a folder that no other user can write to, with a name that cannot be
    predicted, so that no link can be planted there.

    Raises:
        OSError: as the writer raised it, with `target` in place of the temporary path.
    """
    real = Path(os.path.realpath(target))
    folder = _part_folder(target, real)
    part = folder / target.name
    try:
        yield part
        for written in sorted(
            folder.iterdir(), key=lambda file: file.suffix == ".json"
        ):
            goal = real if written == part else target.with_name(written.name)
            _move(written, goal)
        flush_folder(real.parent)
    except BaseException as error:
        _rename_in(error, {str(part): str(target), str(folder): str(target.parent)})
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def remove_parts(folder: Path, pattern: str) -> None:
    """Removes what interrupted processes have left of files with such names."""
    for part in folder.glob(f"{_PART}*/{pattern}"):
        part.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            part.parent.rmdir()


def _part_folder(target: Path, real: Path) -> Path:
    try:
        if real.is_symlink():
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        # Mode 0700; the name is new and random.
        return Path(tempfile.mkdtemp(prefix=_PART, dir=real.parent))
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(target)) from error


def _move(written: Path, goal: Path) -> None:
    """Gives a file its name when it is on disk."""
    if goal.is_file():
        written.chmod(stat.S_IMODE(goal.stat().st_mode) & 0o777)
    if written.is_file():
        with written.open("rb") as file:
            os.fsync(file.fileno())
    written.replace(goal)


def _rename_in(error: BaseException, names: dict[str, str]) -> None:
    """Replaces paths in an error."""

    def renamed(value: Any) -> Any:
        if not isinstance(value, str):
            return value
        for old, new in names.items():
            value = value.replace(old, new)
        return value

    error.args = tuple(map(renamed, error.args))
    if isinstance(error, OSError) and error.filename is not None:
        error.filename = renamed(error.filename)
        if error.filename2 is not None:
            # A move has two names, which are one to the user.
            del error.filename2


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
