"""Content of a snapshot: a description of the shards, then their rows in pieces.

Each is a record. A snapshot has all rows, or those that have changed since the one that
it *follows*. Rows are read into the arrays, without a copy of the file in memory.
"""

from __future__ import annotations

import io
import math
import struct
from collections.abc import Iterable, Mapping
from typing import Any, BinaryIO

import numpy as np

from keras_strategies.parameter_server.server.changed_rows import (
    ShardPiece,
    bytes_of_rows,
)
from keras_strategies.parameter_server.server.record_files import (
    RecordReader,
    write_record,
)
from keras_strategies.parameter_server.server.variable_store import (
    AppliedUpdates,
    VariableStore,
)
from keras_strategies.parameter_server.wire.arrays.row_arrays import put_rows
from keras_strategies.parameter_server.wire.step_messages import Key
from keras_strategies.training.saving.archives import (
    naming_damage,
    open_archive,
    with_arrays,
    write_archive,
)

_KIND = "snapshot of a parameter server"
_PARTS = {"follows", "version", "applied", "shards", "extra"}
#: Header of a piece: the shard's place in the description, the first row, the number of
#: rows, and the bytes of each id (0 for consecutive rows).
_PIECE = struct.Struct("<qqqq")
#: The place in the last record, with the number of pieces for the first row.
_END = -1


def described(store: VariableStore, extra: Any, follows: int) -> bytes:
    """The first record of a snapshot.

    Args:
        store: the variables.
        extra: additional content.
        follows: int, the generation whose rows it changes; 0 for none.
    """
    applied = store.applied
    shards = [
        # An empty array has the dtype, also of those that NumPy has not got.
        (key, array.shape, np.empty(0, array.dtype))
        for key, array in store.arrays.items()
    ]
    state = {
        "follows": follows,
        "version": store.version,
        "applied": (applied.steps, applied.done, applied.requests),
        "shards": shards,
        "extra": extra,
    }
    archive = io.BytesIO()
    write_archive(archive, _KIND, state)
    return archive.getvalue()


def write_snapshot(
    file: BinaryIO, description: bytes, keys: list[Key], pieces: Iterable[ShardPiece]
) -> None:
    """Writes a snapshot.

    Args:
        file: an unbuffered file.
        description: of `described`.
        keys: the shards, in the order of the description.
        pieces: their rows.
    """
    write_record(file, description)
    places = {key: place for place, key in enumerate(keys)}
    count = 0
    for key, start, ids, rows in pieces:
        width = 0 if ids is None else ids.itemsize
        header = _PIECE.pack(places[key], start, len(rows), width)
        parts = [] if ids is None else [ids.data]
        if rows.size:
            parts.append(rows.reshape(-1).data)
        write_record(file, header, *parts)
        count += 1
    write_record(file, _PIECE.pack(_END, count, 0, 0))


def read_description(reader: RecordReader, name: str) -> dict[str, Any]:
    """Reads the first record of a snapshot.

    Args:
        reader: of the open file.
        name: str, how errors name it.
    """
    length = reader.next()
    if length is None:
        raise reader.damaged()
    payload = reader.read(length)
    reader.check()
    with open_archive(io.BytesIO(payload), _KIND, name) as state, naming_damage(name):
        found: dict[str, Any] = with_arrays(state)
        for part in _PARTS - found.keys():
            raise KeyError(part)
        return found


def read_rows(
    reader: RecordReader, description: Mapping[str, Any], store: VariableStore
) -> VariableStore:
    """The variables of a snapshot.

    Args:
        reader: of the file, after its description.
        description: of `read_description`.
        store: the variables of the snapshot that it follows, which are changed.
    """
    found = VariableStore()
    found.version = description["version"]
    found.applied = AppliedUpdates(*description["applied"])
    new = {}
    for key, shape, empty in description["shards"]:
        array = store.arrays.get(key)
        if array is None or (array.shape, array.dtype) != (shape, empty.dtype):
            # No file makes this process take more memory than it has bytes.
            if math.prod(shape) * empty.itemsize > reader.size:
                raise reader.damaged()
            array = np.empty(shape, empty.dtype)
            new[key] = len(array) if array.ndim else 1
        found.arrays[key] = array
    counts = _read_pieces(reader, list(found.arrays.values()))
    for key, count in zip(found.arrays, counts, strict=True):
        if count != new.get(key, count):
            raise reader.damaged()
    return found


def _read_pieces(reader: RecordReader, arrays: list[np.ndarray]) -> list[int]:
    """Reads all pieces; returns the number of rows of each array."""
    rows = [bytes_of_rows(array) for array in arrays]
    counts, pieces = [0] * len(arrays), 0
    while reader.next() is not None:
        place, start, count, width = _PIECE.unpack(reader.read(_PIECE.size))
        if place == _END:
            reader.check()
            if start != pieces:
                break
            return counts
        is_inside = 0 <= place < len(arrays) and start >= 0 and count >= 0
        if not is_inside or start + count > len(rows[place]) or width not in (0, 4, 8):
            break
        _read_piece(reader, rows[place], start, count, width)
        counts[place] += count
        pieces += 1
    raise reader.damaged()


def _read_piece(
    reader: RecordReader, rows: np.ndarray, start: int, count: int, width: int
) -> None:
    target = rows[start : start + count]
    if width == 0:
        if target.size:
            reader.read_into(target.reshape(-1).data)
        reader.check()
        return
    ids = np.frombuffer(reader.read(count * width), f"u{width}").astype(np.int64)
    values = np.empty_like(target)
    if values.size:
        reader.read_into(values.reshape(-1).data)
    reader.check()
    if len(ids) and start + int(ids.max()) >= len(rows):
        raise reader.damaged()
    put_rows(rows, start + ids, values)
