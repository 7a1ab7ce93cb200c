"""Stalls: which workers the others wait for, since when, and where they are.

Each worker counts the group's collectives and the steps since the last one, which are
the same on all, and sends these numbers, its position, with its heartbeats, and for how
long it waits for other workers, as far as it can tell. Workers are awaited if they are
missing in a collective of the group, or have the lowest position while nothing moves,
or do not wait while others do.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass

from keras_strategies.lead.state import KnownWorker

#: Seconds of a wait after which the awaited workers are named.
STALL_SECONDS = 30.0
# Seconds to wait for the answer of an awaited worker.
_ANSWER_SECONDS = 2.0
# Seconds after which one that others wait for in a collective is given up, too.
_MORE = 2.0
# Number of awaited workers that are named.
_NAMED = 4
_NO_ANSWER = "It does not answer: it is stopped, or busy in one call outside of Python"


@dataclass(frozen=True)
class _Stall:
    """A wait of some workers for others."""

    key: Hashable
    what: str
    since: float
    awaited: tuple[int, ...]


class StallWatch:
    """Finds the workers that the others wait for; the caller has a lock.

    Args:
        after: float, seconds of a wait after which they are named; again after twice
            the time, and so on.
        ask: callable with a worker's index, asks it where it is; see `answered`.
        worker_of: callable with a worker's index; returns what is known of it.
    """

    def __init__(
        self,
        after: float,
        ask: Callable[[int], None],
        worker_of: Callable[[int], KnownWorker],
    ):
        self._after = after
        self._ask = ask
        self._worker_of = worker_of
        # Numbers and waits of the last beats; and when the numbers of one have changed.
        self._positions: dict[int, tuple[tuple[int, ...], float]] = {}
        self._moved = 0.0
        # Collectives that some workers have reached, and since when.
        self._pending: dict[Hashable, float] = {}
        self._stall: _Stall | None = None
        # Seconds of the wait at which it is reported next.
        self._due = after
        self._asked: float | None = None
        self._answers: dict[int, str] = {}
        self._text = ""

    def beat(
        self, index: int, numbers: Sequence[int], waits: float, now: float
    ) -> None:
        """Receives a worker's position with its heartbeat.

        Args:
            index: int, the worker.
            numbers: its position: its collectives, and the steps since.
            waits: float, seconds for which it waits for others; 0 if not known.
            now: float, the time in seconds.
        """
        before = self._positions.get(index, ((), 0.0))
        self._positions[index] = tuple(numbers), waits
        if before[0] != tuple(numbers):
            self._moved = now

    def answered(self, index: int, where: str) -> None:
        """Receives where a worker is."""
        self._answers[index] = where

    def tick(
        self,
        collectives: Mapping[Hashable, tuple[str, Collection[int]]],
        now: float,
    ) -> str | None:
        """Called with each heartbeat.

        Args:
            collectives: dict with the name of each collective that some workers have
                reached, and these.
            now: float, the time in seconds.

        Returns:
            str, a report about the awaited workers when it is due, or None.
        """
        begun = {key: self._pending.get(key, now) for key in collectives}
        self._pending = begun
        stall = self._of_collectives(collectives, now) or self._of_positions(now)
        last = self._stall
        if stall is None or last is None or stall.key != last.key:
            self._due, self._asked = self._after, None
        self._stall = stall
        if stall is None or now - stall.since < self._due:
            return None
        named = stall.awaited[:_NAMED]
        if self._asked is None:
            self._asked, self._answers = now, {}
            for index in named:
                self._ask(index)
        is_late = now - self._asked >= _ANSWER_SECONDS
        if not is_late and not self._answers.keys() >= {*named}:
            return None
        self._asked, self._due = None, 2 * (now - stall.since)
        self._text = self._report(stall, named, now)
        return self._text

    def overdue(self, seconds: float, now: float) -> tuple[int, str] | None:
        """A worker that others wait for in an engine, which may wait without end.

        It may have to arrive in a collective, too: that of a batch is begun before the
        step. Those who wait there have had their error some seconds before.

        Args:
            seconds: float, the time after which it is overdue.
            now: float, the time in seconds.

        Returns:
            Its index, and the last report about it; None without one.
        """
        stall = self._stall
        if stall is None or now - stall.since < seconds + bool(stall.what) * _MORE:
            return None
        return stall.awaited[0], self._text

    def _of_collectives(
        self,
        collectives: Mapping[Hashable, tuple[str, Collection[int]]],
        now: float,
    ) -> _Stall | None:
        for key, since in self._pending.items():
            if now - since >= self._after:
                what, arrived = collectives[key]
                awaited = tuple(i for i in sorted(self._positions) if i not in arrived)
                return _Stall(key, f"in {what!r}", since, awaited)
        return None

    def _of_positions(self, now: float) -> _Stall | None:
        """Workers that the others wait for in an engine's collectives."""
        positions = self._positions
        since, waits = self._moved, 0.0
        if len(positions) > 1:
            waits = max(each[1] for each in positions.values())
        if max(now - since, waits) < self._after or len(positions) < 2:
            return None
        found = {index: each[0] for index, each in sorted(positions.items())}
        first, last = min(found.values()), max(found.values())
        if first != last and now - since >= self._after:
            awaited = tuple(i for i, numbers in found.items() if numbers == first)
        elif first == last and waits >= self._after:
            since = now - waits
            awaited = tuple(i for i in found if not positions[i][1])
        else:
            return None
        return _Stall(tuple(found.items()), "", since, awaited) if awaited else None

    def _report(self, stall: _Stall, named: tuple[int, ...], now: float) -> str:
        seconds = now - stall.since
        texts = []
        for index in named:
            worker = self._worker_of(index)
            at = f" It is at {worker.progress}" if worker.progress else ""
            where = self._answers.get(index)
            if where is None:
                place = f"{at}. {_NO_ANSWER}"
            else:
                place = f"{at}, in {where}" if at else f" It is in {where}"
            what = f" {stall.what}" if stall.what else ""
            texts.append(
                f"Worker {worker.index} ({worker.host}, process {worker.pid}) has been "
                f"awaited{what} for {seconds:.0f} s.{place}."
            )
        more = len(stall.awaited) - len(named)
        return " ".join([*texts, *([f"{more} more are awaited."] if more else [])])
