"""Large arrays between processes of one machine: in memory that both of them have.

ZeroMQ carries a message; its large arrays may lie in a *region*, an anonymous file of
the sender's that the receiver maps. Copied there once and read where they are, 2 MB
cost a tenth of what they cost through a socket, where they are copied four times, in
pieces. A region has no name that could be left behind, and is gone with the last
process that has it.

Used only for requests and replies that alternate; see `SharedBufferWriter` for when
a region is reused.
"""

from __future__ import annotations

import itertools
import math
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from keras_strategies.parameter_server.wire.row_arrays import ALIGNMENT, empty_aligned

#: Whether this system has anonymous files, and lets processes of one user open them.
IS_AVAILABLE = hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd")

#: Below so many bytes in all, a socket costs less.
LEAST_BYTES = 65536
_FIRST_BYTES = 1 << 20


@dataclass(frozen=True)
class SharedBufferReference:
    """Where arrays lie.

    Args:
        pid: int, of the process whose region it is.
        descriptor: int, the file, as that process knows it.
        serial: int, tells regions of one process apart.
        size: int, bytes of the region.
        places: pairs of an array's first byte and its bytes.
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
        #: The message whose arrays are in it.
        self.number = -1
        #: Bytes that arrays of this message have taken so far.
        self.used = 0

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray | None:
        """An array here; None if there is no room."""
        start, size = self.used, dtype.itemsize * math.prod(shape)
        if start + size > self.size:
            return None
        self.used = start + _padded(size)
        return self.bytes[start : start + size].view(dtype).reshape(shape)

    def place_of(self, array: memoryview) -> int | None:
        """Where an array begins that is here already; None for others."""
        start = _address(np.frombuffer(array, np.uint8)) - _address(self.bytes)
        return start if 0 <= start < self.size else None

    def close(self) -> None:
        """Ends this process's part; who has mapped the region keeps it."""
        os.close(self.descriptor)


class SharedBufferWriter:
    """Puts arrays where one peer can read them.

    Two regions take turns. What is in one stays until the peer has answered a later
    message than the one that told of it; if that has not happened when its turn comes,
    because the peer was slow and has been given up, a new region takes its place.

    What is made for a message can be made in its region: between `begin` and `write`,
    `empty` gives arrays that need no copy then.
    """

    def __init__(self) -> None:
        self._regions: list[_Region] = []
        self._answered = -1
        # The region of the message that has been begun.
        self._begun: _Region | None = None
        # The bytes of the largest message.
        self._most = 0

    def answered(self, number: int) -> None:
        """Notes that the peer has answered a message."""
        self._answered = max(self._answered, number)

    def begin(self, number: int) -> None:
        """Begins a message, the number of which is higher than all before."""
        self._begun = self._free(self._most)
        self._begun.number = number
        self._begun.used = 0

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
        """An array for the message that was begun, in its region if there is room."""
        assert self._begun is not None
        found = self._begun.empty(shape, dtype)
        return empty_aligned(shape, dtype) if found is None else found

    def write(self, arrays: Sequence[memoryview], number: int) -> SharedBufferReference:
        """Copies those arrays to the message's region that are not in it.

        Args:
            arrays: the memory of each, contiguous bytes.
            number: int, the message that tells of them.
        """
        if self._begun is None:
            self.begin(number)
        region, self._begun = self._begun, None
        assert region is not None
        others = (a.nbytes for a in arrays if region.place_of(a) is None)
        if region.used + sum(map(_padded, others)) > region.size:
            # All of it goes to a larger one.
            size = sum(_padded(array.nbytes) for array in arrays)
            region.close()
            region = self._regions[-1] = _Region(_room(size))
            region.number = number
        places = []
        for array in arrays:
            place = region.place_of(array)
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
        if len(self._regions) == 2:
            region = self._regions.pop(0)
            if region.number < self._answered and region.size >= size:
                self._regions.append(region)
                return region
            region.close()
        while len(self._regions) < 2:
            self._regions.append(_Region(_room(size)))
        return self._regions[-1]

    def close(self) -> None:
        """Ends this process's part of the regions."""
        for region in self._regions:
            region.close()
        self._regions.clear()


def _room(size: int) -> int:
    """Bytes of a region for arrays of so many: more, as batches differ."""
    return max(_FIRST_BYTES, 1 << (size * 5 // 4 - 1).bit_length())


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _address(array: np.ndarray) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


class SharedBufferReader:
    """Reads what one peer has lent."""

    def __init__(self) -> None:
        self._mapped: dict[tuple[int, int], mmap.mmap] = {}

    def read(self, reference: SharedBufferReference) -> list[memoryview]:
        """The memory of the arrays.

        Raises:
            OSError: if the peer is gone.
        """
        key = (reference.pid, reference.serial)
        if key not in self._mapped:
            # Of more than the two that take turns, the oldest has been replaced.
            for old in list(self._mapped)[:-1]:
                del self._mapped[old]
            descriptor = os.open(
                f"/proc/{reference.pid}/fd/{reference.descriptor}", os.O_RDWR
            )
            try:
                # Writable: frameworks may use memory that is nobody else's.
                self._mapped[key] = mmap.mmap(descriptor, reference.size)
            finally:
                os.close(descriptor)
        memory = memoryview(self._mapped[key])
        return [memory[start : start + length] for start, length in reference.places]

    def has(self, array: np.ndarray) -> bool:
        """Whether an array lies in memory that the peer will write to again."""
        address = _address(array)
        for mapped in self._mapped.values():
            first = _address(np.frombuffer(mapped, np.uint8))
            if first <= address < first + len(mapped):
                return True
        return False
