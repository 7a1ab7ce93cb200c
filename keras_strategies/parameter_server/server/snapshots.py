"""Snapshot files of a parameter server: generations, chains, journals.

A *snapshot* is the state at one moment: variables and the names of the updates applied
to them. Shards and optimizers that are created later are appended to a *journal*, so
that a server that dies between two snapshots is restored with all of its shards and
loses only updates.

Each snapshot starts a *generation*: `ps-0.7.snapshot`, and `ps-0.7.journal` for what
was created since. Generation 0 has only a journal. A snapshot is *full*, or has the
rows that have changed since the one before: the *chain* of the last full one and all
that follow it is the state. A chain is at most half as long again as its full snapshot.
The present chain and the one before are kept on disk. A file with a wrong checksum is
not used: the server then restores the generation before it and all journals since.
While a snapshot is written, events are appended to the journals of both generations:
the file may never be complete. Both kinds of file are sequences of records
(`record_files.py`).
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from keras_strategies.errors import CheckpointError, SnapshotError
from keras_strategies.parameter_server.server.changed_rows import (
    ChangedRows,
    ShardPiece,
)
from keras_strategies.parameter_server.server.record_files import (
    DamagedFileError,
    RecordReader,
    write_record,
)
from keras_strategies.parameter_server.server.snapshot_content import (
    described,
    read_description,
    read_rows,
    write_snapshot,
)
from keras_strategies.parameter_server.server.snapshot_writer import BackgroundWrite
from keras_strategies.parameter_server.server.variable_store import VariableStore
from keras_strategies.parameter_server.wire.step_messages import Key
from keras_strategies.training.saving.archives import (
    naming_damage,
    open_archive,
    with_arrays,
    write_archive,
)
from keras_strategies.training.saving.atomic_files import flush_folder, remove_parts

_EVENT = "record of a parameter server"
#: Chains kept on disk: the present one, and the previous one as a fallback.
_CHAINS = 2
#: Bytes of the snapshots that follow a full one, at most, as a fraction of all shards.
_MOST_FOLLOWING = 0.5


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
        # Full generations known to be complete, latest last; 0 for the initial state.
        self._full = [0]
        # Whether the next snapshot has all rows; bytes since the last one that had.
        self._needs_full = True
        self._following_bytes = 0
        # Writes the snapshot of the following generation; None if none is written.
        self._writer: BackgroundWrite | None = None
        self._changes = ChangedRows()

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
        """Begins to write a snapshot of the present state, in a thread.

        Args:
            store: the variables, with `ChangedRows`.
            extra: additional content of the file.

        Raises:
            RuntimeError: `SnapshotError` if it cannot be written.
        """
        assert self._writer is None and store.changes is not None
        following, changes = self._generation + 1, store.changes
        nbytes = changes.changed_bytes(store.arrays)
        most = _MOST_FOLLOWING * store.nbytes
        is_full = self._needs_full or self._following_bytes + nbytes > most
        self._nbytes = store.nbytes if is_full else nbytes
        self._is_full, self._changes = is_full, changes
        description = described(store, extra, 0 if is_full else self._generation)
        try:
            if self._journal(following).exists():
                # Of a snapshot that was not complete.
                self._journal(following).unlink()
        except OSError as error:
            raise self._failed_snapshot(error) from error
        changes.begin(store.arrays, is_full)
        # After a failure, rows that are marked now are in no file.
        self._needs_full = True
        kept = [*self._full, following][-_CHAINS:] if is_full else self._full
        write = functools.partial(
            _write, description, list(store.arrays), changes.pieces()
        )
        self._writer = BackgroundWrite(
            self._snapshot(following), write, lambda: self._remove_older(kept[0])
        )

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
            self._changes.end()
            raise self._failed_snapshot(error) from error
        self._writer, self._needs_full = None, False
        self._generation += 1
        if self._is_full:
            self._full = [*self._full, self._generation][-_CHAINS:]
            self._following_bytes = 0
        else:
            self._following_bytes += self._nbytes
        return True

    def abort(self) -> None:
        """Gives up a snapshot that is being written."""
        if self._writer is not None:
            self._writer.abort()
            self._writer = None
            self._changes.end()

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
                    write_record(file, payload)
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
        self._generation, self._full, self._needs_full = 0, [0], True

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
                store, extra, full = self._read_chain(generation)
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
            self._full = [full]
            return RestoredState(store, extra, events, " ".join(damages))
        raise SnapshotError(
            f"Parameter server {self._index} cannot restore any of its snapshots. "
            f"{' '.join(damages)}"
        )

    def _read_chain(self, generation: int) -> tuple[VariableStore, Any, int]:
        """The state of a generation, and the full snapshot of its chain."""
        follows, extra, full = generation, None, generation
        with contextlib.ExitStack() as stack:
            chain: list[Callable[[VariableStore], VariableStore]] = []
            while follows:
                full, path = follows, self._snapshot(follows)
                name = f"The snapshot {path}"
                file = stack.enter_context(path.open("rb"))
                reader = RecordReader(file, path)
                description = read_description(reader, name)
                extra = description["extra"] if not chain else extra
                follows = description["follows"]
                if not isinstance(follows, int) or not 0 <= follows < full:
                    raise reader.damaged()
                chain.insert(0, functools.partial(read_rows, reader, description))
            store = VariableStore()
            for read in chain:
                store = read(store)
        return store, extra, full

    def _read_journal(self, generation: int) -> Iterator[tuple[str, Any]]:
        path = self._journal(generation)
        if not path.exists():
            return
        with path.open("rb") as file:
            reader = RecordReader(file, path)
            while (length := reader.next()) is not None:
                payload = reader.read(length)
                reader.check()
                name = f"A record of {path}"
                with (
                    open_archive(io.BytesIO(payload), _EVENT, name) as event,
                    naming_damage(name),
                ):
                    kind, value = with_arrays(event)
                yield kind, value


def _write(
    description: bytes,
    keys: list[Key],
    pieces: Iterator[ShardPiece],
    file: BinaryIO,
    check: Callable[[], None],
) -> None:
    """Writes a snapshot, for `BackgroundWrite`."""

    def checked() -> Iterator[ShardPiece]:
        for piece in pieces:
            check()
            yield piece

    write_snapshot(file, description, keys, checked())


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
