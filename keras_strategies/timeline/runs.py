"""Runs: the processes of this machine that train, as their rings say."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from keras_strategies.timeline import ring
from keras_strategies.timeline.recording import SAMPLE_SECONDS, is_alive
from keras_strategies.timeline.ring import NAMES, Ring

_BILLION = 1e9
# Events in an error, and their shortest time in seconds.
_LAST, _LEAST = 4, 1e-4


@dataclass(frozen=True)
class ProcessState:
    """A process, as its ring says at one time.

    Args:
        run: str, the run that it belongs to.
        worker: int, its number.
        host: str.
        pid: int.
        script: str, its script's name and arguments.
        is_alive: bool, whether the process still runs.
        state: str, one of `ring.NAMES`: what it does.
        seconds: float, since when.
        position: pair of int, equal where synchronous workers are at the same place.
        steps: int, steps that have begun.
        rows: int, rows of its steps.
        processes: int, those of the run, on all machines.
        others: str, where the rest of them are.
        place: str, the line of the user's script.
        place_state: str, what it did there.
        place_age: float, seconds since that was seen.
        time: float, the monotonic time of this snapshot.
        ring: `Ring`.
    """

    run: str
    worker: int
    host: str
    pid: int
    script: str
    is_alive: bool
    state: str
    seconds: float
    position: tuple[int, int]
    steps: int
    rows: int
    processes: int
    others: str
    place: str
    place_state: str
    place_age: float
    time: float
    ring: Ring = field(repr=False)


def state_of(found: Ring, now: float | None = None) -> ProcessState:
    """What a ring says now."""
    words = found.words
    now = time.monotonic() if now is None else now
    facts: dict[str, Any] = json.loads(found.text("facts") or "{}")
    state, since = words[ring.KIND] & 0xFF, words[ring.SINCE]
    for kind, place in ((ring.WAIT, ring.WAITING), (ring.GARBAGE, ring.COLLECTING)):
        if words[place]:
            state, since = kind, words[place]
    seconds = max(0.0, now - since / _BILLION)
    return ProcessState(
        run=str(facts.get("run", "")),
        worker=int(facts.get("worker", 0)),
        host=str(facts.get("host", "")),
        pid=int(facts.get("pid", 0)),
        script=str(facts.get("script", "")),
        is_alive=is_alive(found),
        state=NAMES[state],
        seconds=seconds,
        position=(words[ring.POSITION], words[ring.POSITION + 1]),
        steps=words[ring.KIND] >> 32,
        rows=words[ring.ROWS],
        processes=int(facts.get("processes", 1)),
        others=str(facts.get("others", "")),
        place=found.text("place"),
        place_state=NAMES[words[ring.SAMPLED_KIND]],
        place_age=max(0.0, now - words[ring.SAMPLED] / _BILLION),
        time=now,
        ring=found,
    )


def rings(pid: int | None = None) -> list[Ring]:
    """The rings on this machine of this user's processes, the newest first.

    Args:
        pid: int, the number of a process; None for all.
    """
    found = []
    with contextlib.suppress(OSError):
        paths = ring.folder().glob("*.ring" if pid is None else f"*-{pid}.ring")
        for path in sorted(paths, reverse=True):
            with contextlib.suppress(OSError, ValueError):
                found.append(Ring.read(path))
    return found


def processes(run: str = "") -> list[ProcessState]:
    """The processes of a run, by worker, those that have failed included.

    Args:
        run: str, the begin of a run's name, or a process of it; the newest run that
            still trains without it.
    """
    now = time.monotonic()
    found = [state_of(each, now) for each in rings()]
    if run:
        names = [each.run for each in found if f"{each.pid}" == run] or [run]
    else:
        names = [each.run for each in found if each.is_alive]
    chosen = [each for each in found if names and each.run.startswith(names[0])]
    return sorted(chosen, key=lambda each: (each.worker, each.pid))


def last_events(pid: int) -> str:
    """A sentence about the last events of a process of this machine; may be empty."""
    for found in rings(pid):
        return _sentence(found)
    return ""


def _sentence(found: Ring) -> str:
    state = state_of(found)
    # Since when it has written nothing is no time of what it did.
    until = found.words[ring.SAMPLED] / _BILLION + SAMPLE_SECONDS
    seconds = max(0.0, state.seconds - max(0.0, time.monotonic() - until))
    events = [
        f"{NAMES[kind]} {_short(length / _BILLION)} (step {step})"
        for _, length, kind, thread, step in found.records()[-20:]
        if not thread and length / _BILLION >= _LEAST
    ]
    listed = ", ".join([*events[-_LAST:], f"then {state.state} for {_short(seconds)}"])
    place = f", in {state.place}" if state.place else ""
    return f" Its last events: {listed}{place}."


def _short(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.1f} ms"


def trace(found: Sequence[tuple[Ring, int]]) -> dict[str, Any]:
    """The events of rings as a trace of Chrome's, which Perfetto opens.

    See "Trace Event Format" of Chromium: times are microseconds.

    Args:
        found: rings, and the nanoseconds from their clock to the common one.
    """
    events: list[dict[str, Any]] = []
    for each, offset in found:
        facts = json.loads(each.text("facts") or "{}")
        worker = int(facts.get("worker", 0))
        name = f"worker {worker} ({facts.get('host')}, process {facts.get('pid')})"
        events.append(
            {"ph": "M", "name": "process_name", "pid": worker, "args": {"name": name}}
        )
        for start, length, kind, thread, step in each.records():
            if thread == ring.INSIDE:
                continue
            events.append(
                {
                    "ph": "X",
                    "name": f"step {step}" if kind == ring.STEP else NAMES[kind],
                    "cat": NAMES[kind],
                    "pid": worker,
                    "tid": thread,
                    "ts": (start + offset) / 1000,
                    "dur": length / 1000,
                    "args": {"step": step},
                }
            )
    return {"traceEvents": events, "displayTimeUnit": "ms"}
