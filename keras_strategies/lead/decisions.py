"""Decisions about a group of workers, as a pure function of events.

`step` takes a state and an event, and returns the next state and the messages to send.
A *generation* is a group of fixed members. Its phases:

    FORMING   members of the last generation leave it, new workers wait
       |      all that are alive have left: message `begin`
    SYNCING   the chief sends the state of training to the members that are behind
       |      all hold it: message `go`
    RUNNING   steps
       |      a new worker waits, or a worker asks to stop: message `pause`
    PAUSING   members report the steps that they have begun
       |      message `stop_after` with the most
    STOPPING  members finish that step and leave: FORMING

A loss in any of them ends the generation (message `end`): FORMING. The phase OVER is
final: training has ended, or cannot continue.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keras_strategies.lead import events, files, generations, values
from keras_strategies.lead.events import TICK, Beat, Out
from keras_strategies.lead.state import (
    EXITED,
    KnownWorker,
    LeadState,
    Phase,
    replace,
    uids_of,
)

# Seconds, at most, without any connection after which training has ended.
_DESERTED = 2.0


def step(state: LeadState, event: Any) -> tuple[LeadState, Out]:
    """The state after an event, and the messages to send.

    Args:
        state: `LeadState`.
        event: one of the classes of `events.py`, from `Hello` to `Tick`.
    """
    out = Out()
    if state.is_over:
        if isinstance(event, events.Hello):
            generations.tell_over((event.uid,), state.verdict, out, state.is_misuse)
        elif isinstance(event, events.Bye):
            out.tell((event.uid,), "bye")
            state = state.without(event.uid)
        elif isinstance(event, events.Gone):
            state = state.without(event.uid)
        return state, out
    return _HANDLERS[type(event)](state, event, out), out


# Connections


def _hello(state: LeadState, event: events.Hello, out: Out) -> LeadState:
    state = replace(state, same=state.same or (event.index, event.same))
    if (why := _difference(state, event)) is not None:
        generations.tell_over((event.uid,), why, out, is_misuse=True)
        return state if state.has_run else generations.over(state, why, out, True)
    if not state.workers and not state.group.number:
        state = state.with_group(since=state.clock)
    if event.uid not in state.workers:
        state = _without_earlier(state, event.index)
    new = KnownWorker(
        event.uid, event.index, event.host, event.pid, state.clock, state.clock
    )
    known_uids, known = state.workers.keys(), state.workers.get(event.uid, new)
    worker = replace(known, gone=None, seen=state.clock, step=event.step)
    state = replace(state, workers={**state.workers, event.uid: worker})
    facts = {"is_running": state.has_run, "generation": state.group.number}
    out.tell((event.uid,), "welcome", **facts)
    if not state.has_run and event.uid not in known_uids:
        _report_arrivals(state, worker, out)
    if event.generation:
        # Its generation has ended with its connection.
        how = "the connection to the lead was lost"
        to = (event.uid,)
        out.tell(to, "end", generation=event.generation, how=how, loss=None)
        group = state.group
        if event.uid in group.ranks and group.phase is Phase.FORMING:
            return state.with_group(awaited=group.awaited | {event.uid})
    return state


def _without_earlier(state: LeadState, index: int) -> LeadState:
    """Without the processes of an index that have ended: another one has its place."""
    for each in list(state.workers.values()):
        if each.index == index and each.gone is not None:
            state = state.without(each.uid)
    return state


def _report_arrivals(state: LeadState, worker: KnownWorker, out: Out) -> None:
    """Tells worker 0 which workers have come, itself included."""
    first = [each.uid for each in state.workers.values() if each.index == 0]
    shown = state.workers.values() if worker.index == 0 else [worker]
    for count, each in enumerate(shown, len(state.workers) - len(shown) + 1):
        out.tell(first, "arrival", index=each.index, count=count)


def _difference(state: LeadState, event: events.Hello) -> str | None:
    """The reason to refuse a worker with other versions or settings."""
    assert state.same is not None
    other, same = state.same
    for name, value in same.items():
        found = event.same.get(name)
        if found != value:
            return (
                f"Workers disagree on {name}: worker {other} has {value!r}, worker "
                f"{event.index} has {found!r}. Run the same script with the same "
                "versions on all workers."
            )
    return None


def _gone(state: LeadState, event: events.Gone, out: Out) -> LeadState:
    if event.uid not in state.workers:
        return state
    worker = state.workers[event.uid]
    if event.heard is not None:
        worker = _heard(worker, worker.seen, event.heard)
    worker = replace(worker, gone=state.clock)
    state = replace(state, workers={**state.workers, event.uid: worker})
    state = state.left_phase(event.uid)
    return generations.lose(state, worker, "its process or its connection ended", out)


def _bye(state: LeadState, event: events.Bye, out: Out) -> LeadState:
    worker, group = state.workers.get(event.uid), state.group
    out.tell((event.uid,), "bye")
    if worker is None:
        return state
    is_member = group.is_active and event.uid in group.ranks
    state = state.without(event.uid)
    if event.is_complete:
        state = replace(state, completed=max(state.completed, worker.step or 0))
    if not is_member:
        return generations.advance(state, out)
    if not event.is_complete:
        how = event.how or "its script has ended"
        return generations.lose(state, worker, how, out)
    if state.workers.keys().isdisjoint(group.ranks):
        return generations.over(state, "", out)
    state = replace(state, left={**state.left, event.uid: worker})
    loss = state.loss_of(worker, EXITED)
    out.tell(uids_of(state.members), "exited", loss=loss)
    if group.ranks[event.uid] == 0:
        state = files.chief_leaves(state, out)
    state = values.check_left(state, out)
    return generations.advance(state, out)


def _absent(state: LeadState, event: events.Absent, out: Out) -> LeadState:
    return state if state.has_run else generations.over(state, event.why, out)


def _snapshot(state: LeadState, event: events.Snapshot, out: Out) -> LeadState:
    if state.snapshot is not None and state.snapshot[0] >= event.step:
        return state
    return replace(state, snapshot=(event.step, event.path))


# Time


def _tick(state: LeadState, event: events.Tick, out: Out) -> LeadState:
    passed = 0.0 if state.now is None else event.now - state.now
    clock = state.clock + min(passed, 2 * TICK)
    workers = dict(state.workers)
    for uid, beat in event.heard.items():
        if uid in workers:
            workers[uid] = _heard(workers[uid], clock, beat)
    state = replace(state, clock=clock, now=event.now, workers=workers)
    state = _end_deserted(_forget(_refuse_doubles(state, out)), out)
    if state.is_over:
        return state
    state = generations.check_phase(state, out)
    return values.check_waits(state, out)


def _heard(worker: KnownWorker, clock: float, beat: Beat) -> KnownWorker:
    changes: dict[str, Any] = {"seen": clock}
    if beat.step is not None:
        changes["step"] = beat.step
    # The progress of a failed worker is reported.
    if beat.progress is not None and not worker.failure:
        changes["progress"] = beat.progress
    if beat.times:
        changes["times"] = beat.times
    return replace(worker, **changes)


def _refuse_doubles(state: LeadState, out: Out) -> LeadState:
    """Refuses workers that wait with the index of one that stays alive."""
    known = [w for w in state.workers.values() if w.gone is None]
    if len(known) == len({w.index for w in known}):
        return state
    first = {w.index: w for w in reversed(known)}
    first |= {w.index: w for w in state.members if w.gone is None}
    for worker in known:
        other = first[worker.index]
        if other is worker or not state.is_present(other):
            continue
        why = (
            f"Two processes connected as worker {worker.index}: process {other.pid} on "
            f"{other.host}, and process {worker.pid} on {worker.host}. Give each its "
            "own index (`task.index` in TF_CONFIG)."
        )
        if not state.has_run and other.seen > worker.since + 2 * TICK:
            return generations.over(state, why, out, True)
        late = state.clock - worker.since > 2 * state.settings.timeout
        if worker.uid in state.waiting and late:
            generations.tell_over((worker.uid,), why, out, is_misuse=True)
            state = state.without(worker.uid)
    return state


def _end_deserted(state: LeadState, out: Out) -> LeadState:
    """Ends when all workers have ended, so that others can begin at the address."""
    gone = [each.gone for each in state.workers.values()]
    if state.is_over or not state.has_run or None in gone:
        return state
    last = max((each for each in gone if each is not None), default=state.clock)
    if gone and state.clock - last <= min(state.settings.timeout, _DESERTED):
        return state
    verdict = "" if state.completed >= 0 else generations.no_state(state)
    return generations.over(state, verdict, out)


def _forget(state: LeadState) -> LeadState:
    """Forgets workers that cannot return."""
    if all(each.gone is None for each in state.workers.values()):
        return state
    limit = state.clock - generations.LEASE * state.settings.timeout
    kept = {
        uid: each
        for uid, each in state.workers.items()
        if each.gone is None or each.gone >= limit
    }
    return replace(state, workers=kept)


_HANDLERS: dict[type, Callable[[LeadState, Any, Out], LeadState]] = {
    events.Hello: _hello,
    events.Gone: _gone,
    events.Ready: generations.ready,
    events.Holds: generations.holds,
    events.Begun: generations.begun,
    events.Stop: generations.stop,
    events.Arrived: values.arrived,
    events.Saved: files.saved,
    events.AwaitsFile: files.awaits_file,
    events.Snapshot: _snapshot,
    events.Failed: values.failed,
    events.Overdue: values.overdue,
    events.Absent: _absent,
    events.Stack: values.stack,
    events.AskStatus: values.status,
    events.Bye: _bye,
    events.Tick: _tick,
}

#: Events that workers send, by the kind of their message.
EVENTS: dict[str, Any] = {
    each.__name__.lower(): each
    for each in _HANDLERS
    if each not in (events.Hello, events.Gone, events.Overdue, events.Tick)
}
