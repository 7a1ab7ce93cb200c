"""Arrays that are parts of a file: what processes of a machine compare of them."""

from __future__ import annotations

import functools
import os
import uuid
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from keras_strategies.communication.checksums import checksum

#: One of so many rows of a part is compared.
_SAMPLED = 64


def file_part_number(array: np.ndarray) -> int | None:
    """A number that names the part of a file that an array maps; None for others.

    Processes with equal numbers have equal arrays, and need not read all of them to
    know it: machine, file, place and layout are equal, and a sample of the rows, which
    may have been changed in memory.
    """
    base: Any = array
    # A slice of a map has the offset of the map.
    while isinstance(base.base, np.ndarray):
        base = base.base
    if not isinstance(base, np.memmap) or base.filename is None:
        return None
    try:
        about = os.stat(base.filename)
    except OSError:
        return None  # The file has been removed; its memory is still there.
    place = base.offset + array.ctypes.data - base.ctypes.data
    file = about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns
    layout = array.dtype, array.shape, array.strides
    axes = np.argsort([-stride for stride in array.strides], kind="stable")
    rows = array.transpose(axes)[::_SAMPLED] if array.ndim else array
    sample = checksum(np.ascontiguousarray(rows))
    return zlib.crc32(f"{_machine()} {file} {place} {layout} {sample}".encode())


@functools.cache
def _machine() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        return str(uuid.getnode())
