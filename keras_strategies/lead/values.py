"""Comparisons of values, reports of failures, and the table of all workers."""

from __future__ import annotations

from keras_strategies.lead import events, files
from keras_strategies.lead.events import Out
from keras_strategies.lead.generations import lose
from keras_strategies.lead.state import (
    EXITED,
    Comparison,
    KnownWorker,
    LeadState,
    replace,
    uids_of,
)

# A comparison is late this many seconds after the patience: a worker that was stopped
# is lost before.
_MORE = 1.0
# What the table of workers has of each.
_SHOWN = ("index", "host", "pid", "step", "progress", "times")


def arrived(state: LeadState, event: events.Arrived, out: Out) -> LeadState:
    """Members compare a value."""
    group, key = state.group, (event.stream, event.number)
    if event.generation != group.number or not group.is_active:
        return state
    bits = 0
    for uid in (event.uid, *event.others):
        rank = group.ranks.get(uid)
        if rank is None:
            continue
        bits |= 1 << rank
        worker = state.workers[uid]
        if worker.failure or worker.line:
            state = state.with_workers(uid, failure="", line="")
    if not bits:
        return state
    if bits & 1 and not event.stream:
        state = files.chief_compares(state, event.number, out)
    found = state.comparisons.get(key) or Comparison(state.clock)
    found = found.add(event.what, event.value, bits)
    comparisons = {**state.comparisons, key: found}
    if found.arrived == (1 << len(group.ranks)) - 1:
        del comparisons[key]
        out.tell(group.ranks, "compared", key=key, values=_different(found))
    state = replace(state, comparisons=comparisons)
    return check_left(state, out)


def _different(found: Comparison) -> list[tuple[str, str, str]]:
    """Each different value once, with its ranks, if there are several."""
    one = len(found.values) == 1
    return [
        (what, value, "" if one else f"{ranks:x}")
        for (what, value), ranks in found.values.items()
    ]


def check_left(state: LeadState, out: Out) -> LeadState:
    """Ends the generation if others wait for a member that has left."""
    group = state.group
    if not state.comparisons or not state.left:
        return state
    for worker in state.left.values():
        rank = group.ranks[worker.uid]
        for each in state.comparisons.values():
            if not each.arrived >> rank & 1:
                how = f"{EXITED} while others wait in {each.what!r}"
                return lose(state, worker, how, out)
    return state


def failed(state: LeadState, event: events.Failed, out: Out) -> LeadState:
    """Reports the failure of a member to the others."""
    worker, group = state.workers.get(event.uid), state.group
    if worker is None or event.uid not in group.ranks:
        return state
    changes = {"failure": event.how, "progress": event.progress}
    state = state.with_workers(event.uid, **changes)
    facts = {"worker": worker.index, "host": worker.host, "pid": worker.pid}
    facts |= {"how": event.how, "progress": event.progress, "call": event.call}
    others = [w for w in state.members if w.uid != event.uid and w.gone is None]
    out.tell(uids_of(others), "failed", rank=group.ranks[event.uid], **facts)
    return state


def overdue(state: LeadState, event: events.Overdue, out: Out) -> LeadState:
    """Gives up a member for which others wait."""
    worker = state.workers.get(event.uid) or state.left.get(event.uid)
    return state if worker is None else lose(state, worker, event.how, out)


def stack(state: LeadState, event: events.Stack, out: Out) -> LeadState:
    """The line of its script that a worker executes."""
    if event.uid not in state.workers:
        return state
    return state.with_workers(event.uid, line=event.line)


def status(state: LeadState, event: events.AskStatus, out: Out) -> LeadState:
    """Sends the table of all workers."""
    rows = [
        {name: getattr(worker, name) for name in _SHOWN}
        | {
            "rank": state.group.ranks.get(worker.uid),
            "silent": round(state.clock - worker.seen, 2),
            "is_connected": worker.gone is None,
            "waits": worker.uid in state.waiting,
        }
        for worker in state.workers.values()
    ]
    facts = {"phase": state.group.phase.value, "generation": state.group.number}
    out.tell((event.uid,), "status", **facts, workers=rows)
    return state


def check_waits(state: LeadState, out: Out) -> LeadState:
    """Ends late comparisons and waits for files, with the names of those that miss."""
    if state.file_waits:
        state = files.answer_waits(state, out)
    if not state.comparisons:
        return state
    patience, comparisons = state.settings.patience, {}
    for key, each in state.comparisons.items():
        waited = state.clock - each.since
        missing = [w for w in state.members if not _has(state, w, each)]
        comparisons[key] = each
        if waited > patience + _MORE and not each.is_late:
            here = uids_of(w for w in state.members if _has(state, w, each))
            out.tell(here, "late", key=key, error=_late(state, each, missing))
            comparisons[key] = replace(each, is_late=True)
    return replace(state, comparisons=comparisons)


def _has(state: LeadState, worker: KnownWorker, comparison: Comparison) -> bool:
    return bool(comparison.arrived >> state.group.ranks[worker.uid] & 1)


def _late(state: LeadState, each: Comparison, missing: list[KnownWorker]) -> str:
    names = "; ".join(
        f"{w}, last heard of {state.clock - w.seen:.1f} s ago" for w in missing
    )
    return (
        f"Not all workers reached {each.what!r} within {state.settings.patience:g} s. "
        f"Missing: {names}. `CommunicationOptions(timeout_seconds=...)` sets this "
        "timeout."
    )
