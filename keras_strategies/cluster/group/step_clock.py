"""Times of a worker's steps without its waits for others, and slow workers.

Synchronous workers finish a step together, regardless of which one is late. A worker's
own time is therefore that of the step without waits for other workers. Where an engine
waits inside of compiled programs, it is the processor time of the process, and the time
of input.
"""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

#: Number of steps over which times are averaged.
WINDOW = 20
# Number of longest steps of a window that are excluded: compilation, a checkpoint.
_OUTLIERS = WINDOW // 10
# A slow worker takes this many times as long as the median of the others.
_FACTOR = 2
# Smaller differences, in seconds, may be due to the scheduler of the system.
_LEAST = 0.02


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
        self._count = 0
        self._begin = self._processor = 0.0
        # Number of concurrent waits, the start of the first, and the total.
        self._waiting = 0
        self._wait_begin = self._waited = 0.0
        # Time of input beyond its processor time.
        self._reading = 0.0

    def begin(self, count: int = 1) -> None:
        """Ends the previous steps, and begins others."""
        with self._lock:
            now, processor = time.perf_counter(), self._processor_time()
            self._finish(now, processor)
            self._count, self._begin, self._processor = count, now, processor
            self._waited = self._reading = 0.0

    def end(self) -> None:
        """Ends the steps under way."""
        with self._lock:
            self._finish(time.perf_counter(), self._processor_time())

    def _processor_time(self) -> float:
        """Processor seconds of the process, if they are used."""
        return 0.0 if self.sees_waits else time.process_time()

    def _finish(self, now: float, processor: float) -> None:
        if self._count > 0:
            seconds = now - self._begin
            if self.sees_waits:
                own = seconds - self._waited
            else:
                own = processor - self._processor + self._reading
            waits = max(0.0, seconds - own)
            times = (own / self._count, waits / self._count)
            self._recent.extend([times] * self._count)
            self._steps += self._count
        self._count = 0

    def cancel(self) -> None:
        """Drops the steps under way."""
        self._count = 0

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Context of a wait for other workers; several threads may be in it."""
        with self._lock:
            if not self._waiting:
                self._wait_begin = time.perf_counter()
            self._waiting += 1
        try:
            yield
        finally:
            with self._lock:
                self._waiting -= 1
                if not self._waiting:
                    self._waited += time.perf_counter() - self._wait_begin

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Context of the read of a batch, in the thread of the steps."""
        begin, processor = time.perf_counter(), self._processor_time()
        waited = self._waited
        try:
            yield
        finally:
            seconds = time.perf_counter() - begin - (self._waited - waited)
            self._reading += max(0.0, seconds - (self._processor_time() - processor))

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
    return [
        index
        for index, each in enumerate(times)
        if each.own > _FACTOR * (median := others_median(times, index))
        and each.own - median > _LEAST
    ]


def others_median(times: Sequence[StepTimes], index: int) -> float:
    """Median of the other workers' own times in seconds per step."""
    others = [each.own for other, each in enumerate(times) if other != index]
    return statistics.median(others)
