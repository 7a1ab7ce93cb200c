"""Files of HDF5 that are written and read at their place in a `.keras` archive.

Keras writes a large model's variables to a file beside the archive, and then copies it
in pieces of 8 KiB; when it loads them it copies them out first.
"""

from __future__ import annotations

import io
import os
import struct
import time
import zipfile
import zlib
from pathlib import Path
from typing import Any, Self

_PIECE_BYTES = 256 << 10
#: Lengths of the name and of the extra field, at the end of an entry's local header.
_LENGTHS = struct.Struct("<26xHH")


class ArchiveEntry(io.RawIOBase):
    """An entry of an archive that is a file, without compression.

    Args:
        path: of the archive.
        info: the entry.
        start: int, where its content begins.
        flags: int, of `os.open`.

    Attributes:
        error: the first error of a write; None without one.
    """

    def __init__(self, path: str | Path, info: zipfile.ZipInfo, start: int, flags: int):
        self._info = info
        self._start = start
        self._position = 0
        self._size = info.file_size
        self._descriptor = os.open(path, flags)
        self.error: OSError | None = None

    @classmethod
    def new(cls, archive: zipfile.ZipFile, name: str) -> Self | None:
        """An entry to write, the next one; None if the archive is in memory.

        Nothing else is written before `add_to`.
        """
        path = _path(archive)
        if path is None:
            return None
        assert archive.fp is not None
        archive.fp.flush()
        info = zipfile.ZipInfo(name, time.localtime()[:6])
        info.CRC, info.external_attr = 0, 0o600 << 16
        info.header_offset = archive.start_dir
        start = info.header_offset + len(info.FileHeader(zip64=True))
        return cls(path, info, start, os.O_RDWR)

    @classmethod
    def existing(cls, archive: zipfile.ZipFile, name: str) -> Self | None:
        """An entry to read; None if it is compressed, or its archive in memory.

        Raises:
            zipfile.BadZipFile: if its checksum does not match its bytes.
        """
        path, info = _path(archive), archive.getinfo(name)
        if (
            path is None
            or info.compress_type != zipfile.ZIP_STORED
            or info.flag_bits & 1
        ):
            return None
        start = info.header_offset + _LENGTHS.size
        with open(path, "rb") as file:
            file.seek(info.header_offset)
            header = file.read(_LENGTHS.size)
        if len(header) == _LENGTHS.size:
            start += sum(_LENGTHS.unpack(header))
        entry = cls(path, info, start, os.O_RDONLY)
        try:
            if entry.checksum() != info.CRC:
                raise zipfile.BadZipFile(f"Bad CRC-32 for file {name!r}")
        except BaseException:
            entry.close()
            raise
        return entry

    def add_to(self, archive: zipfile.ZipFile) -> None:
        """Writes the header of a new entry, when its content is complete."""
        info, file = self._info, archive.fp
        assert file is not None
        info.CRC = self.checksum()
        info.file_size = info.compress_size = self._size
        header = info.FileHeader(zip64=True)
        _write(self._descriptor, header, info.header_offset)
        file.seek(self._start + self._size)
        archive.filelist.append(info)
        archive.NameToInfo[info.filename] = info
        archive.start_dir = file.tell()

    def checksum(self) -> int:
        """The CRC-32 of the content."""
        found, memory = 0, memoryview(bytearray(_PIECE_BYTES))
        for start in range(0, self._size, _PIECE_BYTES):
            piece = memory[: min(_PIECE_BYTES, self._size - start)]
            _read(self._descriptor, piece, self._start + start)
            found = zlib.crc32(piece, found)
        return found

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        origins = {os.SEEK_CUR: self._position, os.SEEK_END: self._size}
        self._position = origins.get(whence, 0) + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")[: max(0, self._size - self._position)]
        _read(self._descriptor, view, self._start + self._position)
        self._position += view.nbytes
        return view.nbytes

    def write(self, data: Any) -> int:
        """Writes all bytes: HDF5 does not look at the number that is returned."""
        view = memoryview(data).cast("B")
        try:
            _write(self._descriptor, view, self._start + self._position)
        except OSError as error:
            self.error = self.error or error
            raise
        self._position += view.nbytes
        self._size = max(self._size, self._position)
        return view.nbytes

    def truncate(self, size: int | None = None) -> int:
        self._size = self._position if size is None else size
        os.ftruncate(self._descriptor, self._start + self._size)
        return self._size

    def close(self) -> None:
        if not self.closed:
            os.close(self._descriptor)
        super().close()


def _path(archive: zipfile.ZipFile) -> str | None:
    """The path of an archive; None if it is in memory."""
    name = getattr(archive.fp, "name", None)
    return name if isinstance(name, str) and os.path.isfile(name) else None


def _read(descriptor: int, view: memoryview, start: int) -> None:
    done = 0
    while done < view.nbytes:
        piece = view[done : done + _PIECE_BYTES]
        count = os.preadv(descriptor, [piece], start + done)
        if not count:
            raise zipfile.BadZipFile("The archive is truncated")
        done += count


def _write(descriptor: int, data: bytes | memoryview, start: int) -> None:
    view, done = memoryview(data), 0
    while done < view.nbytes:
        piece = view[done : done + _PIECE_BYTES]
        done += os.pwrite(descriptor, piece, start + done)
