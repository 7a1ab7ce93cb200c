"""Times of snapshots."""

from __future__ import annotations

import math
import time

from keras_strategies.cluster.group import WorkerGroup

#: Minimum time between snapshots, in pauses: they take one percent of training.
_PAUSES = 100
#: Maximum number of steps between two exchanges of the chief's clock.
_MOST_STEPS = 1000


class SnapshotClock:
    """The times of snapshots, by steps and seconds.

    Args:
        every_steps: int, steps between two snapshots; None for the time alone.
        every_seconds: float, seconds between two snapshots; at least 100 pauses.
        group: the workers, if they make snapshots together at the chief's times.
    """

    def __init__(
        self,
        every_steps: int | None,
        every_seconds: float,
        group: WorkerGroup | None = None,
    ):
        self._every_steps = every_steps
        self._every_seconds = every_seconds
        self._group = group
        self._pause = 0.0
        #: bool, whether a snapshot is due, until one is taken.
        self.is_due = False
        self._begin()

    def tick(self) -> None:
        """Counts a step."""
        self._steps += 1
        by_steps = self._every_steps is not None and self._steps >= self._every_steps
        self.is_due = self.is_due or by_steps or self._is_due_by_time()

    def taken(self, pause: float) -> None:
        """Begins the time until the next snapshot.

        Args:
            pause: float, seconds that this one has stopped training.
        """
        self._pause = max(pause, self._pause / 2)
        self._begin()

    def _begin(self) -> None:
        self.is_due = False
        self._steps = 0
        self._steps_to_exchange = 1
        self._begun = time.monotonic()

    def _is_due_by_time(self) -> bool:
        if math.isinf(self._every_seconds):
            return False
        interval = max(self._every_seconds, _PAUSES * self._pause)
        elapsed = time.monotonic() - self._begun
        if self._group is None:
            return elapsed >= interval
        self._steps_to_exchange -= 1
        if self._steps_to_exchange:
            return False
        left = (interval - elapsed) / max(elapsed / self._steps, 1e-6)
        own = [elapsed >= interval, max(1, min(int(left), _MOST_STEPS))]
        found = self._group.gather_values("the time of a snapshot", own)[0]
        self._steps_to_exchange = int(found[1])
        return bool(found[0])
