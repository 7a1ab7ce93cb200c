"""The ring of this process, and what is written to it.

The state is the innermost of what the thread that trains has begun. What has ended is
a record. Waits, which threads of an engine make as well, and garbage collection are
records inside of others. A thread of its own writes the line of the user's script twice
a second, for readers that come when the process is stopped.

A step has two or three records, each of about a microsecond: see
`benchmarks/recording_costs.py`.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import itertools
import json
import os
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from keras_strategies.timeline import ring
from keras_strategies.timeline.places import main_thread_place, reading_place
from keras_strategies.timeline.ring import (
    COLLECTING,
    COUNT,
    GARBAGE,
    HEADER,
    INSIDE,
    OPENED,
    OTHERS,
    OUTSIDE,
    POSITION,
    RECORD,
    RECORDS,
    ROWS,
    SAMPLED,
    SAMPLED_KIND,
    SINCE,
    STARTED,
    STEP,
    WAIT,
    WAITING,
    Ring,
)
from keras_strategies.user_warnings import warn_user

#: Seconds between two looks at the script's line.
SAMPLE_SECONDS = 0.5
# Shorter garbage collections, in nanoseconds, are no events.
_LEAST_GARBAGE = 1_000_000
# Files of processes that have ended are removed after these seconds.
_OLD = 24 * 3600.0
_now, _thread = time.monotonic_ns, threading.get_ident
# Native order, of which each word is one copy.
_put_two, _put_three = struct.Struct("QQ").pack_into, struct.Struct("QQQ").pack_into
_STATE, _FIRST = 8 * ring.KIND, 8 * HEADER
T = TypeVar("T")
_recorder: RingWriter | None = None


class RingWriter:
    """Writes the ring of this process.

    Args:
        path: the file; None for memory that other processes do not see.
    """

    def __init__(self, path: Path | None):
        self.path = path
        self.ring = Ring.create(path)
        self._words = words = self.ring.words
        self._memory = words.cast("B")
        self._numbers = itertools.count()
        self._owner = threading.get_ident()
        # What the thread has begun, and when; other threads by their number.
        self._stack = [(OUTSIDE, 0)]
        self._others: dict[int, list[tuple[int, int]]] = {}
        self._step = self._rows = self._garbage = 0
        self._facts: dict[str, Any] = {}
        words[SINCE] = words[OPENED] = _now()
        words[STARTED] = ring.started_at(os.getpid())
        words[ring.MAGIC] = ring.MAGIC_WORD
        self._is_over = threading.Event()
        self._thread = threading.Thread(
            target=self._sample, name="timeline", daemon=True
        )
        self._thread.start()
        gc.callbacks.append(self._collects)

    def describe(self, **facts: Any) -> None:
        """Writes facts about this process, such as its run and its worker's number."""
        self._facts |= facts
        self.ring.set_text("facts", json.dumps(self._facts))

    def begin(self, kind: int) -> None:
        """A thread begins something."""
        if (thread := _thread()) != self._owner:
            self._others.setdefault(thread, []).append((kind, _now()))
            return
        if kind == STEP:
            self._step += 1
        now = _now()
        self._stack.append((kind, now))
        _put_two(self._memory, _STATE, kind | self._step << 32, now)

    def end(self) -> None:
        """What the thread has begun last has ended."""
        now = _now()
        if (thread := _thread()) != self._owner:
            kind, begun = (others := self._others[thread]).pop()
            if not others:
                del self._others[thread]
            self._put(begun, now - begun, kind | (thread & OTHERS) << 8)
            return
        kind, begun = self._stack.pop()
        _put_two(self._memory, _STATE, self._stack[-1][0] | self._step << 32, now)
        self._put(begun, now - begun, kind)

    def _put(self, start: int, length: int, meta: int) -> None:
        number = next(self._numbers)
        at = _FIRST + 8 * RECORD * (number % RECORDS)
        _put_three(self._memory, at, start, length, meta | self._step << 32)
        self._words[COUNT] = number + 1

    def waiting(self) -> None:
        """A thread begins to wait for other workers; none did before."""
        self._words[WAITING] = _now()

    def waited(self) -> None:
        """No thread waits any longer."""
        start, self._words[WAITING] = self._words[WAITING], 0
        self._put(start, _now() - start, WAIT)

    def waited_inside(self, seconds: float, waits: float) -> None:
        """The last seconds had waits in the programs of steps."""
        length = int(1e9 * seconds)
        self._put(_now() - length, int(1e9 * waits), WAIT | INSIDE << 8)

    def count_rows(self, count: int) -> None:
        """Counts rows of steps."""
        self._rows += count
        self._words[ROWS] = self._rows

    def position(self, collectives: int, steps: int) -> None:
        """The collectives of the group, and the steps since the last one.

        A step that was counted before a collective, and has not begun, makes -1.
        """
        _put_two(self._memory, 8 * POSITION, collectives, max(0, steps))

    def _collects(self, phase: str, info: dict[str, int]) -> None:
        now = _now()
        if phase == "start":
            self._garbage = self._words[COLLECTING] = now
            return
        self._words[COLLECTING] = 0
        if now - self._garbage >= _LEAST_GARBAGE:
            self._put(self._garbage, now - self._garbage, GARBAGE)

    def _sample(self) -> None:
        last = ""
        while True:
            place = main_thread_place()
            kind = self._stack[-1][0]
            if kind == ring.DATA and (reading := reading_place()):
                place = f"{reading}, in a thread, for {place}"
            if place != last:
                self.ring.set_text("place", place)
                last = place
            self._words[SAMPLED_KIND] = kind
            self._words[SAMPLED] = _now()
            if self._is_over.wait(SAMPLE_SECONDS):
                return

    def close(self) -> None:
        """Ends the recording, and removes the file."""
        self._is_over.set()
        with contextlib.suppress(ValueError):
            gc.callbacks.remove(self._collects)
        if self.path is not None:
            self.path.unlink(missing_ok=True)


class Span:
    """A context in which a thread does one kind of things; any number may be in it.

    It is the state of the thread that trains, and an event of others.

    Args:
        kind: int, of `ring.py`.
    """

    def __init__(self, kind: int):
        self._kind = kind

    def __enter__(self) -> None:
        if _recorder is not None:
            _recorder.begin(self._kind)

    def __exit__(self, *error: object) -> None:
        if _recorder is not None:
            _recorder.end()


METHOD, DATA, SAVE = map(Span, (ring.METHOD, ring.DATA, ring.SAVE))
_STEP = Span(STEP)


def recorded_step(function: Callable[..., T]) -> Callable[..., T]:
    """A step function of a model whose calls are recorded."""

    @functools.wraps(function, updated=())
    def recorded(*args: Any) -> T:
        with _STEP:
            return function(*args)

    return recorded


def reading(batches: Iterable[T]) -> Iterator[T]:
    """The batches, each of which is read in `DATA`."""
    iterator, end = iter(batches), object()
    while True:
        with DATA:
            batch: Any = next(iterator, end)
        if batch is end:
            return
        yield batch


def count_rows(batch: Any) -> None:
    """Counts the rows of a batch: those of its first array."""
    while (shape := getattr(batch, "shape", None)) is None:
        if not batch or not isinstance(batch, (tuple, list, dict)):
            return
        batch = next(iter(batch.values())) if isinstance(batch, dict) else batch[0]
    if _recorder is not None and len(shape):
        _recorder.count_rows(int(shape[0] or 0))


def recorder() -> RingWriter | None:
    """The recorder of this process; None before training begins."""
    return _recorder


def start(**facts: Any) -> RingWriter:
    """Begins to record, once in a process, and describes the process.

    Args:
        facts: such as `worker=1`, `run="a1b2"`.
    """
    global _recorder
    if _recorder is None:
        _recorder = RingWriter(_new_file())
        atexit.register(_at_exit)
        script = " ".join([os.path.basename(sys.argv[0]), *sys.argv[1:]])[:200]
        own = {"run": f"{os.getpid()}", "worker": 0, "host": "localhost"}
        facts = {"pid": os.getpid(), "script": script, **own, **facts}
    if facts:
        _recorder.describe(**facts)
    return _recorder


def _new_file() -> Path | None:
    try:
        folder = ring.folder()
        _remove_old(folder)
        return folder / f"{time.time_ns()}-{os.getpid()}.ring"
    except OSError as error:
        warn_user(
            f"`keras-strategies top` does not see this process: {error}. Events are in "
            "its memory only. Set TMPDIR to a folder of yours."
        )
        return None


def _remove_old(folder: Path) -> None:
    for path in folder.glob("*.ring"):
        with contextlib.suppress(OSError, ValueError):
            is_old = time.time() - path.stat().st_mtime > _OLD
            if is_old and not is_alive(Ring.read(path)):
                path.unlink()


def is_alive(found: Ring) -> bool:
    """Whether the process of a ring still runs."""
    pid = int(json.loads(found.text("facts") or "{}").get("pid", 0))
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    state = ring.process_stat(pid)
    return not state or (
        state[0] not in "ZX" and int(state[19]) in (0, found.words[STARTED])
    )


def _at_exit() -> None:
    # The events of a script that has failed are those that are looked at.
    if _recorder is not None and getattr(sys, "last_value", None) is None:
        _recorder.close()


def _forget() -> None:
    """In a forked process: its events are not those of the process before."""
    global _recorder
    if _recorder is not None:
        with contextlib.suppress(ValueError):
            gc.callbacks.remove(_recorder._collects)
    _recorder = None


os.register_at_fork(after_in_child=_forget)
