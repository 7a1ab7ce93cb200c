"""Shared memory for large arrays of messages between processes of one machine.

ZeroMQ carries the message; its large arrays are in a *region*, an anonymous file of the
sender that the receiver maps. They are copied once, instead of four times through a
socket: 2 MB take a tenth of the time. Regions have no name in the file system and end
with the last process that maps them.

Only requests of which at most three are unanswered, and their replies, may use it: see
`SharedBufferWriter`.
"""

from __future__ import annotations

import itertools
import math
import mmap
import os
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from keras_strategies.parameter_server.wire.arrays.array_messages import nbytes
from keras_strategies.parameter_server.wire.arrays.row_arrays import (
    ALIGNMENT,
    empty_aligned,
)

#: Whether this system has anonymous files that other processes can open.
IS_AVAILABLE = hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd")

#: Total bytes of arrays below which a socket is faster.
LEAST_BYTES = 65536
_FIRST_BYTES = 1 << 20
#: Regions of a writer.
MOST_REGIONS = 3
#: Last frame of a message with arrays in shared memory; all other frames have bytes.
_SHARED = b""


@dataclass(frozen=True)
class SharedBufferReference:
    """Location of arrays in shared memory.

    Args:
        pid: int, process of the region.
        descriptor: int, its file descriptor in that process.
        serial: int, number of the region in that process.
        size: int, bytes of the region.
        places: pairs of an array's offset and length in bytes.
    """

    pid: int
    descriptor: int
    serial: int
    size: int
    places: tuple[tuple[int, int], ...]


_serials = itertools.count()


class _Region:
    """An anonymous file of this process."""

    def __init__(self, size: int):
        self.size = size
        self.serial = next(_serials)
        self.descriptor = os.memfd_create("keras_strategies")
        os.ftruncate(self.descriptor, size)
        mapped = mmap.mmap(self.descriptor, size)
        self.memory = memoryview(mapped)
        self.bytes = np.frombuffer(mapped, np.uint8)
        self._start = _address(self.bytes)
        #: The message that refers to it.
        self.number = -1
        #: Bytes used by arrays of this message.
        self.used = 0

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray | None:
        """An array in this region; None without space."""
        start, size = self.used, dtype.itemsize * math.prod(shape)
        if start + size > self.size:
            return None
        self.used = start + _padded(size)
        return self.bytes[start : start + size].view(dtype).reshape(shape)

    def place_of(self, array: memoryview) -> int | None:
        """Offset of an array in this region; None for other arrays."""
        start = _address(np.frombuffer(array, np.uint8)) - self._start
        return start if 0 <= start < self.size else None

    def close(self) -> None:
        """Closes the descriptor; mappings of the peer stay valid."""
        os.close(self.descriptor)


class SharedBufferWriter:
    """Writes arrays to shared memory that one peer reads.

    Regions take turns. A region is reused once the peer has answered a later message
    than the one that refers to it; otherwise a new region replaces it.

    Between `begin` and `write`, `empty` allocates arrays in the region of the message,
    which `write` does not copy.

    Args:
        regions: int, 2 if each message has been answered when the next one is written,
            3 if one or two may be unanswered.
    """

    def __init__(self, regions: int = 2) -> None:
        self._count = regions
        self._regions: list[_Region] = []
        self._answered = -1
        # The region of the started message.
        self._begun: _Region | None = None
        # Bytes of the largest message.
        self._most = 0

    def answered(self, number: int) -> None:
        """Records that the peer has answered a message."""
        self._answered = max(self._answered, number)

    def begin(self, number: int) -> None:
        """Starts a message; its number is higher than all earlier ones."""
        self._begun = self._free(self._most)
        self._begun.number = number
        self._begun.used = 0

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
        """An array for the started message, in its region if there is space."""
        assert self._begun is not None
        found = self._begun.empty(shape, dtype)
        return empty_aligned(shape, dtype) if found is None else found

    def write(self, arrays: Sequence[memoryview], number: int) -> SharedBufferReference:
        """Copies arrays to the region of the message, unless they are in it.

        Args:
            arrays: memory of each, contiguous bytes.
            number: int, the message's.
        """
        if self._begun is None:
            self.begin(number)
        region, self._begun = self._begun, None
        assert region is not None
        found = [region.place_of(array) for array in arrays]
        others = (
            array.nbytes
            for array, place in zip(arrays, found, strict=True)
            if place is None
        )
        if region.used + sum(map(_padded, others)) > region.size:
            # All arrays are written to a larger region.
            size = sum(_padded(array.nbytes) for array in arrays)
            region.close()
            region = self._regions[-1] = _Region(_region_size(size))
            region.number = number
            found = [None] * len(arrays)
        places = []
        for array, place in zip(arrays, found, strict=True):
            if place is None:
                place = region.used
                region.memory[place : place + array.nbytes] = array
                region.used += _padded(array.nbytes)
            places.append((place, array.nbytes))
        self._most = max(self._most, region.used)
        return SharedBufferReference(
            os.getpid(), region.descriptor, region.serial, region.size, tuple(places)
        )

    def _free(self, size: int) -> _Region:
        if len(self._regions) == self._count:
            region = self._regions.pop(0)
            if region.number < self._answered and region.size >= size:
                self._regions.append(region)
                return region
            region.close()
        while len(self._regions) < self._count:
            self._regions.append(_Region(_region_size(size)))
        return self._regions[-1]

    def close(self) -> None:
        """Closes the regions."""
        for region in self._regions:
            region.close()
        self._regions.clear()


def _region_size(size: int) -> int:
    """Size of a region in bytes, with reserve for larger batches."""
    return max(_FIRST_BYTES, 1 << (size * 5 // 4 - 1).bit_length())


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _address(array: np.ndarray) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


class SharedBufferReader:
    """Reads arrays from the shared memory of one peer."""

    def __init__(self) -> None:
        self._mapped: dict[tuple[int, int], mmap.mmap] = {}

    def read(self, reference: SharedBufferReference) -> list[memoryview]:
        """The memory of the arrays.

        Raises:
            OSError: if the peer has died.
        """
        key = (reference.pid, reference.serial)
        if key not in self._mapped:
            # Of more regions than these, the oldest has been replaced.
            for old in list(self._mapped)[: 1 - MOST_REGIONS]:
                del self._mapped[old]
            descriptor = os.open(
                f"/proc/{reference.pid}/fd/{reference.descriptor}", os.O_RDWR
            )
            try:
                # Writable, because frameworks may write to their inputs.
                self._mapped[key] = mmap.mmap(descriptor, reference.size)
            finally:
                os.close(descriptor)
        memory = memoryview(self._mapped[key])
        return [memory[start : start + length] for start, length in reference.places]

    def has(self, array: np.ndarray) -> bool:
        """Whether an array is in shared memory that the peer will reuse."""
        address = _address(array)
        for mapped in self._mapped.values():
            first = _address(np.frombuffer(mapped, np.uint8))
            if first <= address < first + len(mapped):
                return True
        return False


class SharedBuffers:
    """Shared memory of two processes of one machine, on one side.

    Args:
        regions: int, as for `SharedBufferWriter`.
    """

    def __init__(self, regions: int) -> None:
        self.writer = SharedBufferWriter(regions)
        self.reader = SharedBufferReader()
        self._pid: int | None = None

    def write(self, parts: list[Any], number: int) -> list[Any]:
        """Moves the arrays of a message to shared memory, if they are large."""
        if nbytes(parts[1:]) < LEAST_BYTES:
            return parts
        return [parts[0], pickle.dumps(self.writer.write(parts[1:], number)), _SHARED]

    def read(self, buffers: Sequence[Any]) -> list[Any]:
        """The parts of a message, with arrays from shared memory."""
        reference = pickle.loads(buffers[1])
        self._pid = reference.pid
        return [buffers[0], *self.reader.read(reference)]

    @property
    def is_alive(self) -> bool:
        """Whether the peer's process exists; True if unknown."""
        return self._pid is None or os.path.exists(f"/proc/{self._pid}")

    def close(self) -> None:
        self.writer.close()


def is_shared(buffers: Sequence[Any]) -> bool:
    """Whether the arrays of a message are in shared memory."""
    return len(buffers) == 3 and not len(buffers[2])
