"""Records of snapshots and journals: a mark, a length and a checksum before each."""

from __future__ import annotations

import os
import struct
import zlib
from pathlib import Path
from typing import BinaryIO

Buffer = bytes | memoryview

#: Header of each record: mark, length and CRC-32 of the payload; then the CRC-32 of
#: these three.
_HEADER = struct.Struct("<4sQI")
_CHECK = struct.Struct("<I")
_MARK = b"KSR4"
#: How snapshots of earlier versions begin, which were zip archives.
_ZIP = b"PK\x03\x04"
#: Bytes written or checked at a time.
_PIECE_BYTES = 4 << 20


class DamagedFileError(Exception):
    """A file is truncated or its checksums do not match."""


def write_record(file: BinaryIO, *parts: Buffer) -> None:
    """Writes a record.

    Args:
        file: an unbuffered file.
        *parts: its payload.
    """
    views = [memoryview(part).cast("B") for part in parts]
    checksum = 0
    for view in views:
        checksum = _checksum(view, checksum)
    header = _HEADER.pack(_MARK, sum(view.nbytes for view in views), checksum)
    start = memoryview(header + _CHECK.pack(zlib.crc32(header)))
    for piece in (start, *views):
        written = 0
        while written < piece.nbytes:
            # Unbuffered files on a nearly full disk write only a part.
            written += file.write(piece[written : written + _PIECE_BYTES])


class RecordReader:
    """Reads the records of a file, one after the other.

    Args:
        file: the open file.
        path: its path, for errors.
    """

    def __init__(self, file: BinaryIO, path: Path):
        self._file = file
        self._path = path
        self.size = os.fstat(file.fileno()).st_size
        # Of the present record.
        self._expected = self._checksum = self._left = 0

    def next(self) -> int | None:
        """Length of the next record; None at the end.

        The last one may be incomplete: its process died during the write, before its
        reply.

        Raises:
            DamagedFileError: if its header is damaged or of another format.
        """
        header, check = self._file.read(_HEADER.size), self._file.read(_CHECK.size)
        if len(check) < _CHECK.size:
            return None
        mark, length, self._expected = _HEADER.unpack(header)
        is_other = mark[:3] == _MARK[:3] or mark == _ZIP
        if is_other and mark != _MARK:
            raise DamagedFileError(
                f"{self._path} has the format {mark!r}; this version of "
                f"keras_strategies reads {_MARK!r}. Use the version that has written "
                "it, or another folder."
            )
        if mark != _MARK or _CHECK.unpack(check) != (zlib.crc32(header),):
            raise self.damaged()
        if self.size - self._file.tell() < length:
            return None
        self._checksum, self._left = 0, length
        return int(length)

    def read(self, size: int) -> bytearray:
        """The next bytes of the record."""
        found = bytearray(min(size, self._left))
        self.read_into(memoryview(found))
        return found

    def read_into(self, memory: memoryview) -> None:
        """Reads the next bytes of the record into writable memory."""
        view = memory.cast("B")
        if view.nbytes > self._left:
            raise self.damaged()
        for start in range(0, view.nbytes, _PIECE_BYTES):
            piece = view[start : start + _PIECE_BYTES]
            if self._file.readinto(piece) != piece.nbytes:  # type: ignore[attr-defined]
                raise self.damaged()
            self._checksum = zlib.crc32(piece, self._checksum)
        self._left -= view.nbytes

    def check(self) -> None:
        """Raises `DamagedFileError` unless the record was read, and is as written."""
        if self._left or self._checksum != self._expected:
            raise self.damaged()

    def damaged(self) -> DamagedFileError:
        """The error of a file with other bytes than were written."""
        return DamagedFileError(
            f"{self._path} is damaged: its checksums do not match its bytes."
        )


def _checksum(view: memoryview, checksum: int) -> int:
    for start in range(0, view.nbytes, _PIECE_BYTES):
        checksum = zlib.crc32(view[start : start + _PIECE_BYTES], checksum)
    return checksum
