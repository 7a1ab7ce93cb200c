"""Comparisons of values, reports of failures, and the table of all workers."""

from __future__ import annotations

from typing import Any

from keras_strategies.lead import files
from keras_strategies.lead.events import (
    Arrived,
    AskStatus,
    Failed,
    Message,
    Overdue,
    Stack,
)
from keras_strategies.lead.generations import lose
from keras_strategies.lead.state import (
    EXITED,
    Comparison,
    KnownWorker,
    LeadState,
    Out,
    changed_worker,
    members_of,
    replace,
    uids_of,
)

# A comparison is late this many seconds after the patience: a worker that was stopped
# is lost before.
_MORE = 1.0
# What the table of workers has of each.
_SHOWN = ("index", "host", "pid", "step", "progress", "times")


def arrived(state: LeadState, event: Arrived, out: Out) -> LeadState:
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
            state = changed_worker(state, uid, failure="", line="")
    if not bits:
        return state
    if bits & 1 and not event.stream:
        state = files.chief_compares(state, event.number, out)
    found = state.comparisons.get(key) or Comparison(state.clock)
    found = found.add(event.what, event.value, bits)
    comparisons = {**state.comparisons, key: found}
    if found.arrived == (1 << len(group.ranks)) - 1:
        del comparisons[key]
        out.append(Message(tuple(group.ranks), "compared", _answer(key, found)))
    state = replace(state, comparisons=comparisons)
    return check_left(state, out)


def _answer(key: tuple[str, int], found: Comparison) -> dict[str, Any]:
    """Each different value once, with its ranks, if there are several."""
    one = len(found.values) == 1
    values = [
        (what, value, "" if one else f"{ranks:x}")
        for (what, value), ranks in found.values.items()
    ]
    return {"key": key, "values": values}


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


def failed(state: LeadState, event: Failed, out: Out) -> LeadState:
    """Reports the failure of a member to the others."""
    worker, group = state.workers.get(event.uid), state.group
    if worker is None or event.uid not in group.ranks:
        return state
    changes = {"failure": event.how, "progress": event.progress}
    state = changed_worker(state, event.uid, **changes)
    body = {
        "worker": worker.index,
        "rank": group.ranks[event.uid],
        "host": worker.host,
        "pid": worker.pid,
        "how": event.how,
        "progress": event.progress,
        "call": event.call,
    }
    others = [w for w in members_of(state) if w.uid != event.uid and w.gone is None]
    out.append(Message(uids_of(others), "failed", body))
    return state


def overdue(state: LeadState, event: Overdue, out: Out) -> LeadState:
    """Gives up a member for which others wait."""
    worker = state.workers.get(event.uid) or state.left.get(event.uid)
    return state if worker is None else lose(state, worker, event.how, out)


def stack(state: LeadState, event: Stack, out: Out) -> LeadState:
    """The line of its script that a worker executes."""
    if event.uid not in state.workers:
        return state
    return changed_worker(state, event.uid, line=event.line)


def status(state: LeadState, event: AskStatus, out: Out) -> LeadState:
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
    body = {"phase": state.group.phase.value, "generation": state.group.number}
    out.append(Message((event.uid,), "status", {**body, "workers": rows}))
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
        missing = [w for w in members_of(state) if not _has(state, w, each)]
        comparisons[key] = each
        if waited > patience + _MORE and not each.is_late:
            out.append(_late(state, key, each, missing))
            comparisons[key] = replace(each, is_late=True)
    return replace(state, comparisons=comparisons)


def _has(state: LeadState, worker: KnownWorker, comparison: Comparison) -> bool:
    return bool(comparison.arrived >> state.group.ranks[worker.uid] & 1)


def _late(
    state: LeadState, key: tuple[str, int], each: Comparison, missing: list[KnownWorker]
) -> Message:
    names = "; ".join(
        f"{w}, last heard of {state.clock - w.seen:.1f} s ago" for w in missing
    )
    why = (
        f"Not all workers reached {each.what!r} within {state.settings.patience:g} s. "
        f"Missing: {names}. `CommunicationOptions(timeout_seconds=...)` sets this "
        "timeout."
    )
    here = uids_of(w for w in members_of(state) if _has(state, w, each))
    return Message(here, "late", {"key": key, "error": why})
