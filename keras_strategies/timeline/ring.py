"""The ring of events of a process: a file of 64-bit words, which outlives the process.

A header of `HEADER` words, with what the process does now and since when, and `RECORDS`
records of three words: the start and the nanoseconds of an event, and its kind, thread
and step. A write of a word is one copy of eight bytes, so a reader in another process
sees each word as it was written; the record that is overwritten next may be a mixture,
which readers leave out.
"""

from __future__ import annotations

import mmap
import os
import stat
import tempfile
from pathlib import Path
from typing import Any

#: What a process does: nothing of this package, a method outside of its steps, a step,
#: the read of a batch, a wait for other workers, a file, garbage collection.
OUTSIDE, METHOD, STEP, DATA, WAIT, SAVE, GARBAGE = range(7)
NAMES = ("outside", "other", "compute", "data", "wait", "save", "gc")
RECORDS = 8192
HEADER, RECORD = 512, 3
#: Places of words in the header.
MAGIC, COUNT, KIND, SINCE, WAITING, COLLECTING, ROWS, OPENED = range(8)
POSITION, STARTED, SAMPLED, SAMPLED_KIND = 8, 10, 11, 12
#: The thread of records: 0 trains; `INSIDE` are waits in programs of the steps before
#: the record's end, somewhere.
OTHERS, INSIDE = 0x7FFFFF, 0x800000
_OVERLAYS = ((WAITING, WAIT), (COLLECTING, GARBAGE))
_TEXTS = {"facts": (32, 160), "place": (192, 320)}
# Another format has another one.
MAGIC_WORD = 0x32474E4952534B


def folder() -> Path:
    """The folder of the rings of this user's processes.

    Raises:
        OSError: if it cannot be made, or another user may write to it.
    """
    path = Path(tempfile.gettempdir()) / f"keras-strategies-{os.getuid()}"
    path.mkdir(0o700, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise PermissionError(f"{path} belongs to another user")
    if found.st_mode & 0o022:
        raise PermissionError(f"other users may write to {path}")
    return path


def started_at(pid: int) -> int:
    """When a process was started, in ticks; 0 where it is not known."""
    found = process_stat(pid)
    return int(found[19]) if found else 0


def process_stat(pid: int) -> list[str]:
    """The fields of `/proc/PID/stat` from the state on; empty without any."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return []
    return text.rpartition(")")[2].split()


class Ring:
    """A ring, to write to or to read.

    Args:
        words: the memory, as 64-bit words.
    """

    def __init__(self, words: memoryview):
        self.words = words

    @classmethod
    def create(cls, path: Path | None) -> Ring:
        """An empty ring in a new file; in memory of this process without one."""
        size = 8 * (HEADER + RECORD * RECORDS)
        if path is None:
            return cls(memoryview(mmap.mmap(-1, size)).cast("Q"))
        with path.open("x+b") as file:
            os.ftruncate(file.fileno(), size)
            return cls(memoryview(mmap.mmap(file.fileno(), size)).cast("Q"))

    @classmethod
    def read(cls, path: Path) -> Ring:
        """A copy of a ring.

        Raises:
            OSError, ValueError: if there is none.
        """
        return cls.of(path.read_bytes())

    @classmethod
    def of(cls, data: bytes) -> Ring:
        """A ring from its bytes.

        Raises:
            ValueError: if they are no ring.
        """
        words = memoryview(data)
        if len(words) != 8 * (HEADER + RECORD * RECORDS):
            raise ValueError("no ring of events")
        words = words.cast("Q")
        if words[MAGIC] != MAGIC_WORD:
            raise ValueError("no ring of events of this version")
        return cls(words)

    def set_text(self, name: str, text: str) -> None:
        """Replaces a text of the header; a long one is shortened."""
        first, end = _TEXTS[name]
        data = text.encode()[: 8 * (end - first - 1)]
        self.words[first] = 0
        memory = self.words.cast("B")
        memory[8 * first + 8 : 8 * first + 8 + len(data)] = data
        self.words[first] = len(data)

    def text(self, name: str) -> str:
        """A text of the header; empty while it is being written."""
        first, end = _TEXTS[name]
        size = min(self.words[first], 8 * (end - first - 1))
        memory = self.words.cast("B")
        return bytes(memory[8 * first + 8 : 8 * first + 8 + size]).decode(
            errors="replace"
        )

    def records(self) -> list[tuple[int, int, int, int, int]]:
        """Start, nanoseconds, kind, thread and step of events, oldest first."""
        words, count = self.words, self.words[COUNT]
        found: list[Any] = []
        # The oldest one may be overwritten by now.
        for number in range(max(0, count - RECORDS + 1), count):
            at = HEADER + RECORD * (number % RECORDS)
            start, length, meta = words[at : at + RECORD]
            found.append((start, length, meta & 0xFF, meta >> 8 & 0xFFFFFF, meta >> 32))
        return found

    def seconds(self, start: int, end: int) -> dict[str, float]:
        """The seconds of each of `NAMES` between two times in nanoseconds."""
        words = self.words
        records = sorted(self.records())
        start = max(start, words[OPENED])
        if words[COUNT] > RECORDS and records:
            start = max(start, records[0][0])
        state: int = words[KIND] & 0xFF
        now = [(words[SINCE], end, state)]
        now += [(words[p], end, k) for p, k in _OVERLAYS if words[p]]
        found = [0] * len(NAMES)
        # What is not in a record is in a method that has not ended.
        found[METHOD if state else OUTSIDE] = end - start
        spans = [(s, s + n, k) for s, n, k, t, _ in records if not t]
        enclosing: list[tuple[int, int]] = []
        for begun, ended, kind in sorted([*spans, *now], key=_outer_first):
            while enclosing and enclosing[-1][0] <= begun:
                enclosing.pop()
            part = max(0, min(ended, end) - max(begun, start))
            outer = enclosing[-1][1] if enclosing else METHOD if state else OUTSIDE
            found[outer] -= part
            found[kind] += part
            enclosing.append((ended, kind))
        for begun, length, _, thread, _ in records:
            if thread == INSIDE and begun >= start:
                for kind in (STEP, METHOD):
                    taken = min(length, max(0, found[kind]))
                    found[kind] -= taken
                    found[WAIT] += taken
                    length -= taken
        return {n: max(0, f) / 1e9 for n, f in zip(NAMES, found, strict=True)}


def _outer_first(span: tuple[int, int, int]) -> tuple[int, int]:
    begun, ended, _ = span
    return begun, -ended
