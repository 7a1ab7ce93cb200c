"""Who waits for whom: the processes of a run, looked at again and again."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from keras_strategies.timeline import ring
from keras_strategies.timeline.runs import ProcessState, processes

#: Seconds of a wait after which the awaited worker is named.
STALL_SECONDS = 2.0
#: What the time of a worker is divided into.
SHARES = ("data", "compute", "send", "wait", "save", "gc", "other")
# A worker delays the others if their waits are longer by this share of the time.
_DELAY = 0.25
# In fewer steps, one can be an exception.
_SEVERAL = 3
# Less use of the processor is none.
_IDLE = 0.1
_DOING = {
    "outside": "in its script, outside of the methods of a model",
    "other": "between steps, in callbacks or in a first look at the input",
    "compute": "in a step",
    "data": "reading a batch",
    "wait": "waiting for other workers",
    "save": "saving a file",
    "gc": "collecting garbage",
}
_HOW = {
    "ended": "its process has ended",
    "stopped": "stopped, as by SIGSTOP",
    "disk": "waiting for a file system",
    "native": "in one call outside of Python",
    "idle": "without use of the processor: a lock, a sleep or a slow source",
    "busy": "computing",
}


@dataclass(frozen=True)
class AwaitedWorker:
    """A worker that others wait for.

    Args:
        worker: int, its number.
        pid: int, its process.
        state: str, what it does: one of `ring.NAMES`.
        how: str, one of "ended", "stopped", "disk", "native", "idle" and "busy".
        seconds: float, for how long it has been awaited; 0 if it delays each step.
        place: str, the line of the user's script.
    """

    worker: int
    pid: int
    state: str
    how: str
    seconds: float
    place: str

    def __str__(self) -> str:
        since = f"is awaited for {self.seconds:.0f} s"
        if not self.seconds:
            since = "delays the others in every step"
        doing = _HOW[self.how]
        if self.how != "ended":
            doing = f"{_DOING[self.state]}, {doing}"
        place = f", at {self.place}" if self.place else ""
        return f"Worker {self.worker} (process {self.pid}) {since}: {doing}{place}."


@dataclass(frozen=True)
class Row:
    """A worker in a report.

    Args:
        now: `ProcessState`.
        rows: float, its rows per second.
        steps: float, its steps per second.
        count: int, its steps since the report before.
        shares: dict of the parts of its time, which are those of `SHARES`.
        processor: float, processors that it uses.
    """

    now: ProcessState
    rows: float
    steps: float
    count: int
    shares: Mapping[str, float]
    processor: float

    @property
    def how(self) -> str:
        """str, as in `AwaitedWorker`."""
        state = ring.process_stat(self.now.pid)
        if not self.now.is_alive:
            return "ended"
        if state and state[0] in "tT":
            return "stopped"
        if state and state[0] == "D":
            return "disk"
        is_idle = self.processor < _IDLE
        if self.now.place_age > STALL_SECONDS and not is_idle:
            return "native"
        return "idle" if is_idle else "busy"


@dataclass(frozen=True)
class Report:
    """A run at one time, with what has happened since the time before.

    Args:
        rows: tuple of `Row`, by worker.
        awaited: tuple of int, the workers that others wait for.
        findings: tuple of `AwaitedWorker`.
    """

    rows: tuple[Row, ...]
    awaited: tuple[int, ...]
    findings: tuple[AwaitedWorker, ...]

    @property
    def others(self) -> str:
        """A sentence about processes of the run that are not seen; may be empty."""
        return _others_of(self.rows)


class Watch:
    """Looks at a run.

    Args:
        run: str, as of `processes`.
    """

    def __init__(self, run: str = ""):
        self._run = run
        self._last: dict[int, tuple[ProcessState, float]] = {}
        # Places of the last look or two, by process and state.
        self._places: dict[tuple[int, str], str] = {}

    def look(self) -> Report:
        """The run now; rates and shares are those since the look before."""
        found = processes(self._run)
        if found:
            self._run = found[0].run
        found = _newest(found)
        for each in found:
            self._places[each.pid, each.place_state] = each.place
        rows = _with_sends([self._row(each) for each in found])
        self._last = {each.pid: (each, _processor_seconds(each.pid)) for each in found}
        awaited = awaited_workers(rows)
        return Report(tuple(rows), awaited, tuple(self._findings(rows, awaited)))

    def _row(self, now: ProcessState) -> Row:
        last, processor = self._last.get(now.pid, (now, 0.0))
        seconds = now.time - last.time
        if not seconds:
            return Row(now, 0.0, 0.0, 0, dict.fromkeys(SHARES, 0.0), 0.0)
        parts = now.ring.seconds(int(1e9 * last.time), int(1e9 * now.time))
        parts["other"] += parts.pop("outside")
        every = sum(parts.values()) or 1.0
        shares = {name: parts.get(name, 0.0) / every for name in SHARES}
        return Row(
            now,
            (now.rows - last.rows) / seconds,
            (now.steps - last.steps) / seconds,
            now.steps - last.steps,
            shares,
            max(0.0, _processor_seconds(now.pid) - processor) / seconds,
        )

    def _findings(
        self, rows: Sequence[Row], awaited: Sequence[int]
    ) -> list[AwaitedWorker]:
        others = [row.now for row in rows if row.now.worker not in awaited]
        waited = max((each.seconds for each in others if each.is_alive), default=0.0)
        found = []
        for row in rows:
            if row.now.worker not in awaited:
                continue
            seconds = row.now.seconds if len(rows) == 1 else waited
            if seconds >= STALL_SECONDS or row.how == "ended":
                found.append(self._finding(row, row.now.state, max(1.0, seconds)))
        return found or self._delays(rows)

    def _delays(self, rows: Sequence[Row]) -> list[AwaitedWorker]:
        """The worker for which all others wait in each step."""
        if len(rows) < 2 or min(row.count for row in rows) < _SEVERAL:
            return []
        slow, *others = sorted(rows, key=lambda row: row.shares["wait"])
        if _median(others, "wait") - slow.shares["wait"] < _DELAY:
            return []
        states = [name for name in SHARES if name not in ("wait", "send")]
        more = {name: slow.shares[name] - _median(others, name) for name in states}
        return [self._finding(slow, max(more, key=more.__getitem__), 0.0)]

    def _finding(self, row: Row, state: str, seconds: float) -> AwaitedWorker:
        now = row.now
        place = now.place
        if not seconds:
            place = self._places.get((now.pid, state), place)
        return AwaitedWorker(now.worker, now.pid, state, row.how, seconds, place)


def _newest(found: Sequence[ProcessState]) -> list[ProcessState]:
    """One process of each worker: of those that have ended, no earlier ones."""
    by_worker: dict[int, ProcessState] = {}
    for each in sorted(found, key=lambda each: (each.is_alive, each.time)):
        by_worker[each.worker] = each
    return [by_worker[worker] for worker in sorted(by_worker)]


def _with_sends(rows: list[Row]) -> list[Row]:
    """Of waits, those that all workers have are the exchange itself."""
    common = min((row.shares["wait"] for row in rows), default=0.0)
    return [
        replace(
            row,
            shares={**row.shares, "send": common, "wait": row.shares["wait"] - common},
        )
        for row in rows
    ]


def _others_of(rows: Sequence[Row]) -> str:
    """Where the rest of a run is; empty if all of its processes are in the rows."""
    first = rows[0].now if rows else None
    if first is None or len(rows) >= first.processes:
        return ""
    text = f"{len(rows)} of {first.processes} processes of the run are shown. "
    waits = min(row.now.seconds for row in rows)
    if waits >= STALL_SECONDS and _all_wait(rows):
        text += f"They have waited for {waits:.0f} s for one that is not. "
    return text + first.others


def _all_wait(rows: Sequence[Row]) -> bool:
    return all(row.now.is_alive and row.now.state == "wait" for row in rows)


def awaited_workers(rows: Sequence[Row]) -> tuple[int, ...]:
    """The workers that the others wait for, if there are some."""
    if _all_wait(rows) and _others_of(rows):
        return ()
    if len(rows) == 1:
        now = rows[0].now
        return (now.worker,) if now.state in ("data", "save", "gc") else ()
    alive = [row for row in rows if row.now.is_alive]
    if not alive or len(alive) < len(rows):
        return tuple(row.now.worker for row in rows if not row.now.is_alive)
    first = min(row.now.position for row in rows)
    behind = [row for row in rows if row.now.position == first]
    if len(behind) == len(rows):
        # In the same exchange, or in the step before it.
        behind = [row for row in rows if row.how == "stopped"]
        behind = behind or _others(rows, lambda row: row.now.state != "wait")
        behind = behind or _others(rows, lambda row: row.now.state != "compute")
        behind = behind or _others(rows, lambda row: row.processor > 5 * _IDLE)
    return tuple(row.now.worker for row in behind)


def _others(rows: Sequence[Row], is_other: Callable[[Row], bool]) -> list[Row]:
    """Those that differ from the rest; none if all do."""
    found = [row for row in rows if is_other(row)]
    return found if len(found) < len(rows) else []


def _median(rows: Sequence[Row], name: str) -> float:
    ordered = sorted(row.shares[name] for row in rows)
    middle = len(ordered) // 2
    return (ordered[middle] + ordered[~middle]) / 2


def _processor_seconds(pid: int) -> float:
    state = ring.process_stat(pid)
    ticks = int(state[11]) + int(state[12]) if state else 0
    return ticks / os.sysconf("SC_CLK_TCK")
