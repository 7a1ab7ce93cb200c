"""Times of a worker's steps without its waits for others, and slow workers.

Synchronous workers finish a step together, regardless of which one is late. A worker's
own time is therefore that of the step without waits for other workers. Where an engine
waits inside of compiled programs, it is the processor time of the process, and the time
of input and of callbacks after a batch. The system call that reads the processor time
can take the processor from a step, so short steps are measured together, with one
reading for all of them.
"""

from __future__ import annotations

import bisect
import contextlib
import statistics
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from keras_strategies.timeline import recording

#: Number of steps over which times are averaged.
WINDOW = 20
# Number of longest steps of a window that are excluded: compilation, a checkpoint.
_OUTLIERS = WINDOW // 10
# A slow worker takes this many times as long as the median of the others.
_FACTOR = 2
# Smaller differences, in seconds, may be due to the scheduler of the system.
_LEAST = 0.02
# Shorter steps, in seconds, are measured together, to read the processor time seldom.
_SPAN = 0.05
# The processor time of reads and callbacks is measured after one that takes longer, in
# seconds.
_LONG_READ = 0.005


@dataclass(frozen=True)
class StepTimes:
    """Mean times of a worker's last steps, 20 at most.

    Args:
        steps: int, finished steps, of all methods.
        own: float, seconds per step without waits for other workers.
        waits: float, seconds per step of waits for other workers.
    """

    steps: int = 0
    own: float = 0.0
    waits: float = 0.0


class StepClock:
    """Measures the steps of one worker; times can be read from any thread.

    Args:
        sees_waits: bool, whether `waiting` is entered for all waits for other workers.
    """

    def __init__(self, sees_waits: bool = False):
        self.sees_waits = sees_waits
        self._lock = threading.Lock()
        self._recent: deque[tuple[float, float]] = deque(maxlen=WINDOW)
        self._steps = 0
        # Steps that are measured together, and the last of them.
        self._count = self._last_count = 0
        self._begin = self._last_begin = self._processor = 0.0
        # Number of concurrent waits, the start of the first, and the total.
        self._waiting = 0
        self._wait_begin = self._waited = 0.0
        # Time of reads and callbacks beyond their processor time, and how many of them
        # are to be measured.
        self._reading, self._reads = 0.0, 0

    def begin(self, count: int = 1) -> None:
        """Ends the previous steps, and begins others."""
        with self._lock:
            now = time.perf_counter()
            if self.sees_waits or now - self._begin >= _SPAN:
                self._record(now)
            if not self._count:
                self._begin, self._processor = now, self._processor_time()
                self._waited = self._reading = 0.0
            self._count += count
            self._last_count, self._last_begin = count, now

    def end(self) -> None:
        """Ends the steps under way."""
        with self._lock:
            self._record(time.perf_counter())

    def cancel(self) -> None:
        """Drops the steps that began last."""
        with self._lock:
            self._count -= self._last_count
            self._record(self._last_begin)

    def _processor_time(self) -> float:
        """Processor seconds of the process, if they are used."""
        return 0.0 if self.sees_waits else time.process_time()

    def _record(self, now: float) -> None:
        """Records the steps since `_begin`."""
        if (count := self._count) > 0:
            seconds = now - self._begin
            own = seconds - self._waited
            if not self.sees_waits:
                own = self._processor_time() - self._processor + self._reading
            waits = max(0.0, seconds - own)
            if not self.sees_waits and (recorder := recording.recorder()) is not None:
                recorder.waited_inside(seconds, max(0.0, waits - self._waited))
            self._recent.extend([(own / count, waits / count)] * count)
            self._steps += count
        self._count = 0

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Context of a wait for other workers; several threads may be in it."""
        with self._lock:
            if not self._waiting:
                self._wait_begin = time.perf_counter()
                if (recorder := recording.recorder()) is not None:
                    recorder.waiting()
            self._waiting += 1
        try:
            yield
        finally:
            with self._lock:
                self._waiting -= 1
                if not self._waiting:
                    self._waited += time.perf_counter() - self._wait_begin
                    if (recorder := recording.recorder()) is not None:
                        recorder.waited()

    @property
    def wait_seconds(self) -> float:
        """Seconds of the wait for other workers that is under way; 0 without one."""
        with self._lock:
            begin = self._wait_begin if self._waiting else None
        return 0.0 if begin is None else time.perf_counter() - begin

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Context of the read of a batch, in the thread of the steps."""
        begun = self.begin_own()
        try:
            yield
        finally:
            self.end_own(begun)

    def begin_own(self) -> tuple[float, float | None]:
        """The begin of what this worker does by itself outside of a step's programs."""
        processor = self._processor_time() if self._reads else None
        return time.perf_counter() - self._waited, processor

    def end_own(self, begun: tuple[float, float | None]) -> None:
        """Its end: the time in which it used no processor is no wait for others."""
        begin, processor = begun
        seconds = time.perf_counter() - self._waited - begin
        if processor is not None:
            self._reading += max(0.0, seconds + processor - self._processor_time())
        self._reads = WINDOW if seconds > _LONG_READ else max(0, self._reads - 1)

    @property
    def times(self) -> StepTimes:
        """Times of the last steps."""
        with self._lock:
            recent, steps = list(self._recent), self._steps
        if not recent:
            return StepTimes()
        shortest = sorted(recent)[: max(1, len(recent) - _OUTLIERS)]
        own, waits = map(statistics.fmean, zip(*shortest, strict=True))
        return StepTimes(steps, own, waits)


def slow_workers(times: Sequence[StepTimes]) -> list[int]:
    """Indices of workers that take twice the median of the others over 20 steps."""
    if len(times) < 2 or min(each.steps for each in times) < WINDOW:
        return []
    ordered = sorted(each.own for each in times)
    return [
        index
        for index, each in enumerate(times)
        if each.own > _FACTOR * (median := _median_without(ordered, each.own))
        and each.own - median > _LEAST
    ]


def _median_without(ordered: Sequence[float], value: float) -> float:
    """Median of sorted numbers without one that is `value`."""
    left_out = bisect.bisect_left(ordered, value)
    others = len(ordered) - 1
    middle = ((others - 1) // 2, others // 2)
    return statistics.fmean(ordered[i + (i >= left_out)] for i in middle)
