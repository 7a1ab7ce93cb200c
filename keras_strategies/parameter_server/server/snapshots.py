"""Snapshot files of a parameter server: generations, journals, checksums.

A *snapshot* is the full state at one moment: variables and the names of the updates
applied to them. Shards and optimizers that are created later are appended to a
*journal*, so that a server that dies between two snapshots is restored with all of its
shards and loses only updates.

Each snapshot starts a *generation*: `ps-0.7.snapshot`, and `ps-0.7.journal` for what
was created since. Generation 0 has only a journal. Two generations are kept on disk. A
file with a wrong checksum is not used: the server then restores the previous
generation and all journals since. While a snapshot is written, events are appended to
the journals of both generations: the file may never be complete. A snapshot is an
archive (`saving/archives.py`); a journal is a sequence of records, of which each
contains one.
"""

from __future__ import annotations

import contextlib
import io
import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from keras_strategies.errors import CheckpointError, SnapshotError
from keras_strategies.parameter_server.server.snapshot_writer import ForkedWrite
from keras_strategies.parameter_server.server.variable_store import (
    AppliedUpdates,
    VariableStore,
)
from keras_strategies.training.saving.archives import (
    naming_damage,
    open_archive,
    with_arrays,
    write_archive,
)
from keras_strategies.training.saving.atomic_files import flush_folder, remove_parts

#: Header of each record: mark, length and CRC-32 of the payload; then the CRC-32 of
#: these three.
_HEADER = struct.Struct("<4sQI")
_CHECK = struct.Struct("<I")
_MARK = b"KSR2"
#: Bytes written or checked at a time.
_PIECE_BYTES = 4 << 20
_KIND = "snapshot of a parameter server"
_EVENT = "record of a parameter server"
#: Generations kept on disk: the latest, and the previous one as a fallback.
_GENERATIONS = 2


class DamagedFileError(Exception):
    """A file is truncated or its checksums do not match."""


@dataclass(frozen=True)
class RestoredState:
    """State restored from a server's files.

    Args:
        store: the snapshot's; empty for generation 0.
        extra: additional content of the snapshot; None for generation 0.
        events: pairs of a kind and a value, created since the snapshot.
        damage: str, damaged files and their replacement; "" for none.
    """

    store: VariableStore
    extra: Any
    events: list[tuple[str, Any]]
    damage: str = ""


class SnapshotFiles:
    """Snapshots and journals of one parameter server.

    Args:
        folder: str, their folder.
        index: int, the number of the server.
    """

    def __init__(self, folder: str, index: int):
        self._folder = Path(folder)
        self._name = f"ps-{index}"
        self._index = index
        self._generation = max(self._generations(), default=0)
        # Generations known to be complete, latest last.
        self._complete = [0]
        # Writes the snapshot of the following generation; None if none is written.
        self._writer: ForkedWrite | None = None

    @property
    def folder(self) -> Path:
        """The folder of the files."""
        return self._folder

    @property
    def path(self) -> Path:
        """The latest snapshot's file."""
        return self._snapshot(self._generation)

    def _snapshot(self, generation: int) -> Path:
        return self._folder / f"{self._name}.{generation}.snapshot"

    def _journal(self, generation: int) -> Path:
        return self._folder / f"{self._name}.{generation}.journal"

    def _generations(self) -> list[int]:
        """The generations that have a snapshot, latest first."""
        found = []
        for path in self._folder.glob(f"{self._name}.*.snapshot"):
            middle = path.name[len(self._name) + 1 : -len(".snapshot")]
            if middle.isdigit():
                found.append(int(middle))
        return sorted(found, reverse=True)

    # Writing

    @property
    def is_writing(self) -> bool:
        """Whether a snapshot has begun and is not finished."""
        return self._writer is not None

    def begin(self, store: VariableStore, extra: Any) -> None:
        """Begins to write a snapshot of the present state, in a child process.

        Args:
            store: the variables.
            extra: additional content of the file.

        Raises:
            RuntimeError: `SnapshotError` if it cannot be written.
        """
        assert self._writer is None
        following, state = self._generation + 1, _state_of(store, extra)
        self._nbytes = store.nbytes
        try:
            if self._journal(following).exists():
                # Of a snapshot that was not complete.
                self._journal(following).unlink()
            self._writer = ForkedWrite(
                self._snapshot(following),
                lambda part: write_archive(part, _KIND, state),
            )
        except OSError as error:
            raise self._failed_snapshot(error) from error

    def finish(self, waits: bool) -> bool:
        """Starts the generation of a snapshot if it is complete; returns whether it is.

        Args:
            waits: bool, whether to wait for it.

        Raises:
            RuntimeError: `SnapshotError` if the file cannot be written; earlier
                snapshots remain.
        """
        assert self._writer is not None
        try:
            if not self._writer.finish(waits):
                return False
        except OSError as error:
            self._writer = None
            raise self._failed_snapshot(error) from error
        self._writer = None
        self._generation += 1
        self._complete = [*self._complete, self._generation][-_GENERATIONS:]
        self._remove_older(self._complete[0])
        return True

    def abort(self) -> None:
        """Gives up a snapshot that is being written."""
        if self._writer is not None:
            self._writer.abort()
            self._writer = None

    def _failed_snapshot(self, error: OSError) -> SnapshotError:
        path = self._snapshot(self._generation + 1)
        return self._failure(f"its snapshot {path}", self._nbytes, error)

    def note(self, kind: str, value: Any) -> None:
        """Appends an event to the journal and flushes it to disk.

        Raises:
            RuntimeError: `SnapshotError` if it cannot be written.
        """
        archive = io.BytesIO()
        write_archive(archive, _EVENT, (kind, value))
        payload = archive.getbuffer()
        self._append(self._journal(self._generation), payload)
        if self.is_writing:
            self._append(self._journal(self._generation + 1), payload)

    def _append(self, path: Path, payload: memoryview) -> None:
        try:
            with path.open("ab", buffering=0) as file:
                length = file.tell()
                try:
                    _write_record(file, payload)
                    os.fsync(file.fileno())
                except OSError:
                    # A partial record would hide the following ones.
                    with contextlib.suppress(OSError):
                        file.truncate(length)
                    raise
            if not length:
                flush_folder(self._folder)
        except OSError as error:
            what = f"its journal {path}"
            raise self._failure(what, len(payload), error) from error

    def clear(self) -> None:
        """Removes the files of another cluster in this folder.

        Raises:
            RuntimeError: `SnapshotError` if one cannot be removed: it would be restored
                later.
        """
        self.abort()
        remove_parts(self._folder, f"{self._name}.*")
        for path in self._folder.glob(f"{self._name}.*"):
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise SnapshotError(
                    f"Parameter server {self._index} cannot remove {path}, a file of "
                    f"another cluster: {error.strerror or error}. Remove it, or name "
                    "another `snapshot_folder`."
                ) from error
        self._generation, self._complete = 0, [0]

    def _remove_older(self, first: int) -> None:
        """Removes the generations before `first`."""
        for path in self._folder.glob(f"{self._name}.*"):
            middle = path.name[len(self._name) + 1 :].split(".")[0]
            if middle.isdigit() and int(middle) < first:
                # A leftover file only takes space: later generations are used first.
                with contextlib.suppress(OSError):
                    path.unlink()

    def _failure(self, what: str, nbytes: int, error: OSError) -> SnapshotError:
        return SnapshotError(
            f"Parameter server {self._index} cannot write {what} "
            f"({nbytes / 1e6:.1f} MB): {error.strerror or error}. "
            f"{describe_disk(self._folder)}"
        )

    # Reading

    def load(self) -> RestoredState | None:
        """The latest restorable state; None without files.

        Raises:
            RuntimeError: `SnapshotError` if every generation is damaged.
        """
        # Of a server that was killed.
        remove_parts(self._folder, f"{self._name}.*")
        found = self._generations()
        if 0 not in found and self._journal(0).exists():
            found.append(0)
        if not found:
            return None
        damages: list[str] = []
        for generation in found:
            try:
                store, extra = self._read_snapshot(generation)
                events = [
                    event
                    for later in range(generation, self._generation + 1)
                    for event in self._read_journal(later)
                ]
            except (DamagedFileError, CheckpointError, OSError) as error:
                text = error.text if isinstance(error, CheckpointError) else str(error)
                damages.append(text)
                continue
            if damages:
                damages.append(
                    f"Parameter server {self._index} restored the previous snapshot, "
                    f"{self._snapshot(generation)}."
                    if generation
                    else f"Parameter server {self._index} restored the initial values "
                    "of its variables: there is no earlier snapshot."
                )
            self._complete = [generation]
            return RestoredState(store, extra, events, " ".join(damages))
        raise SnapshotError(
            f"Parameter server {self._index} cannot restore any of its snapshots. "
            f"{' '.join(damages)}"
        )

    def _read_snapshot(self, generation: int) -> tuple[VariableStore, Any]:
        store = VariableStore()
        if generation == 0:
            return store, None
        path = self._snapshot(generation)
        name = f"The snapshot {path}"
        with open_archive(path, _KIND, name) as state, naming_damage(name):
            store.version = state["version"]
            store.applied = AppliedUpdates(*state["applied"])
            for key, array in state["arrays"]:
                store.arrays[key] = array.read()
            extra = state["extra"]
        return store, extra

    def _read_journal(self, generation: int) -> Iterator[tuple[str, Any]]:
        path = self._journal(generation)
        if not path.exists():
            return
        with path.open("rb") as file:
            while (payload := _read_record(file, path)) is not None:
                name = f"A record of {path}"
                with (
                    open_archive(io.BytesIO(payload), _EVENT, name) as event,
                    naming_damage(name),
                ):
                    kind, value = with_arrays(event)
                yield kind, value


def describe_disk(folder: str | os.PathLike[str]) -> str:
    """A sentence with the filesystem of a folder and its free space."""
    path = Path(folder).absolute()
    while not path.exists():
        path = path.parent
    try:
        found = os.statvfs(path)
    except OSError as error:
        return f"The filesystem of {path} cannot be examined: {error.strerror}."
    while not os.path.ismount(path):
        path = path.parent
    free, total = found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize
    return (
        f"The filesystem mounted at {path} has {free / 1e6:.1f} MB free of "
        f"{total / 1e6:.1f} MB."
    )


def check_folder(folder: str) -> None:
    """Creates a folder for snapshots and checks that it is writable.

    Raises:
        RuntimeError: `SnapshotError` if the folder cannot be created or written.
    """
    probe = Path(folder) / f"probe-{os.getpid()}"
    try:
        os.makedirs(folder, exist_ok=True)
        with probe.open("wb") as file:
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise SnapshotError(
            f"Snapshots cannot be written to snapshot_folder={str(folder)!r}: "
            f"{error.strerror or error}. {describe_disk(folder)} Name a folder "
            "that is writable, or free space there."
        ) from error
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()


def _state_of(store: VariableStore, extra: Any) -> dict[str, Any]:
    """The content of a snapshot."""
    applied = store.applied
    return {
        "version": store.version,
        "applied": (applied.steps, applied.done, applied.requests),
        "arrays": list(store.arrays.items()),
        "extra": extra,
    }


def _write_record(file: BinaryIO, payload: bytes | memoryview) -> None:
    view = memoryview(payload)
    header = _HEADER.pack(_MARK, view.nbytes, _checksum(view))
    for piece in (memoryview(header + _CHECK.pack(zlib.crc32(header))), view):
        written = 0
        while written < piece.nbytes:
            # Unbuffered files on a nearly full disk write only a part.
            written += file.write(piece[written : written + _PIECE_BYTES])


def _read_record(file: BinaryIO, path: Path) -> bytes | None:
    """The next record; None at the end.

    The last one may be incomplete: its process died during the write, before its reply.

    Args:
        file: the open file.
        path: its path, for errors.
    """
    header = _read_header(file, path)
    if header is None:
        return None
    length, checksum = header
    left = os.fstat(file.fileno()).st_size - file.tell()
    if left < length:
        return None
    payload = file.read(length)
    _compare(path, checksum, payload)
    return payload


def _read_header(file: BinaryIO, path: Path) -> tuple[int, int] | None:
    """Length and checksum of the next record; None at the end."""
    header, check = file.read(_HEADER.size), file.read(_CHECK.size)
    if len(check) < _CHECK.size:
        return None
    mark, length, checksum = _HEADER.unpack(header)
    if mark != _MARK and mark[:3] == _MARK[:3]:
        raise DamagedFileError(
            f"{path} has the format {mark!r}; this version of keras_strategies reads "
            f"{_MARK!r}. Use the version that has written it, or another folder."
        )
    if mark != _MARK or _CHECK.unpack(check) != (zlib.crc32(header),):
        raise _damaged(path)
    return length, checksum


def _compare(path: Path, expected: int, payload: bytes | memoryview) -> None:
    if _checksum(memoryview(payload)) != expected:
        raise _damaged(path)


def _checksum(view: memoryview) -> int:
    checksum = 0
    for start in range(0, view.nbytes, _PIECE_BYTES):
        checksum = zlib.crc32(view[start : start + _PIECE_BYTES], checksum)
    return checksum


def _damaged(path: Path) -> DamagedFileError:
    return DamagedFileError(f"{path} is damaged: its checksums do not match its bytes.")
