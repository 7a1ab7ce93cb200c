"""Generations: when one ends, and when and with which workers the next one begins.

# Which state counts

The state of a worker counts until the worker itself reports another one. Initial
values count from when the first generation runs: until then workers may have different
ones. No generation begins from an older state while a worker with a newer one may
return, and none without a state after the first has run.

# One generation at a time

Steps need all members of a generation, so it has ended for certain when one member has
left it. Otherwise the next one waits until the leases of all members have run out
(`client.py`).
"""

from __future__ import annotations

from collections.abc import Callable

from keras_strategies.lead.events import Begun, Holds, Out, Ready, Stop
from keras_strategies.lead.state import (
    NO_HEARTBEAT,
    NONE,
    GenerationState,
    KnownWorker,
    LeadState,
    Loss,
    Phase,
    replace,
    uids_of,
)

# Leases are this much longer at the lead than at a worker.
LEASE = 1.1

# The end


def lose(state: LeadState, worker: KnownWorker, how: str, out: Out) -> LeadState:
    """Ends the generation if the worker is a member of it."""
    if state.group.is_active and worker.uid in state.group.ranks:
        state = _end_by_loss(state, {worker.uid}, state.loss_of(worker, how), out)
    return advance(state, out)


def _end_by_loss(state: LeadState, lost: set[str], loss: Loss, out: Out) -> LeadState:
    if state.settings.is_fixed:
        return over(state, str(loss), out, loss=loss)
    return end(state, lost, str(loss), out, loss)


def end(
    state: LeadState, lost: set[str], how: str, out: Out, loss: Loss | None = None
) -> LeadState:
    """Ends the generation: its members answer with `Ready`."""
    members = [
        each
        for each in state.members
        if each.gone is None and each.uid not in state.waiting
    ]
    number = state.group.number
    out.tell(uids_of(members), "end", generation=number, how=how, loss=loss)
    awaited = {w.uid for w in members if state.is_present(w)} - lost
    return _without_waits(state).with_group(
        phase=Phase.FORMING,
        awaited=frozenset(awaited),
        since=state.clock,
        how=how,
    )


def _without_waits(state: LeadState) -> LeadState:
    """Without what the members of the last generation wait for."""
    return replace(
        state, comparisons={}, files={}, file_waits={}, chief_position=0, left={}
    )


def over(
    state: LeadState,
    verdict: str,
    out: Out,
    is_misuse: bool = False,
    loss: Loss | None = None,
) -> LeadState:
    """Ends training, with an error or, with an empty text, because it has finished."""
    to = uids_of(each for each in state.workers.values() if each.gone is None)
    tell_over(to, verdict, out, is_misuse, loss)
    state = replace(
        state, verdict=verdict, is_misuse=is_misuse, waiting=NONE, comparisons={}
    )
    return state.with_group(phase=Phase.OVER, awaited=NONE)


def tell_over(
    to: tuple[str, ...],
    error: str,
    out: Out,
    is_misuse: bool = False,
    loss: Loss | None = None,
) -> None:
    """Tells workers that training has ended for them (see `over`)."""
    out.tell(to, "over", error=error, is_misuse=is_misuse, loss=loss)


def advance(state: LeadState, out: Out) -> LeadState:
    """Begins the next phase, if no worker is awaited in this one."""
    if state.group.phase is Phase.RUNNING:
        return _admit(state, out)
    if state.group.awaited or state.is_over:
        return state
    return _NEXT[state.group.phase](state, out)


def check_phase(state: LeadState, out: Out) -> LeadState:
    """Excludes silent workers, and those that are alive but late."""
    group, settings = state.group, state.settings
    silent = [each for each in state.members if not state.is_present(each)]
    if group.is_active and silent:
        seconds = state.clock - silent[0].seen
        how = f"{NO_HEARTBEAT} for {max(seconds, settings.timeout):.0f} s"
        lost = {each.uid for each in silent}
        loss = state.loss_of(silent[0], how)
        return advance(_end_by_loss(state, lost, loss, out), out)
    late = state.clock - group.since > settings.patience
    if late and group.phase is Phase.SYNCING:
        first = state.workers[min(group.awaited, key=group.ranks.__getitem__)]
        loss = state.loss_of(first, f"it was not ready within {settings.patience:g} s")
        return advance(_end_by_loss(state, set(group.awaited), loss, out), out)
    if group.phase is Phase.FORMING:
        gone = {each.uid for each in silent}
        state = state.with_group(awaited=NONE if late else group.awaited - gone)
    return advance(state, out)


# The beginning


def _form(state: LeadState, out: Out) -> LeadState:
    """Begins a generation with the workers that wait, if that loses no state."""
    settings = state.settings
    if not (state.workers or state.group.number):
        # Times count from the first worker.
        return state
    is_late = state.clock - state.group.since > settings.patience
    if not (state.has_run or is_late or len(state.waiting) >= settings.most):
        return state
    found = _candidates(state)
    if not (state.has_run or is_late or len(found) >= settings.most):
        return state
    newest = found[0].step if found else None
    if not is_late and _may_get_newer(state, found, newest):
        return state
    if newest is not None and newest + 1 < state.completed:
        return over(state, "", out)
    if state.has_run and newest is None:
        return over(state, "" if state.completed >= 0 else no_state(state), out)
    if _may_still_train(state, found):
        return state
    # A step that was saved by the only worker with it is repeated.
    if newest is not None and state.snapshot and newest + 1 < state.snapshot[0]:
        return over(state, _older_than_snapshot(state, newest), out)
    found = _admitted(state, found)
    if len(found) < settings.least:
        return over(state, _too_few(state, found), out) if is_late else state
    return _begin(state, found[: settings.most], newest, out)


def _candidates(state: LeadState) -> list[KnownWorker]:
    """Workers that wait, one of each index, those with the newest state first."""
    ranks, last = state.group.ranks, len(state.group.ranks)
    waiting = [state.workers[uid] for uid in state.waiting]
    waiting.sort(
        key=lambda w: (-_steps(w), ranks.get(w.uid, last), w.index, w.since, w.uid)
    )
    first: dict[int, KnownWorker] = {}
    for each in waiting:
        if state.is_present(each):
            first.setdefault(each.index, each)
    return list(first.values())


def _steps(worker: KnownWorker) -> int:
    return -1 if worker.step is None else worker.step


def _admitted(state: LeadState, found: list[KnownWorker]) -> list[KnownWorker]:
    """Without new workers, if they cannot begin after the newest state."""
    if not state.has_run or not found or found[0].admits:
        return found
    ranks = state.group.ranks
    return [each for each in found if each is found[0] or each.uid in ranks]


def _may_get_newer(
    state: LeadState, found: list[KnownWorker], newest: int | None
) -> bool:
    """Whether a worker that is away has a newer state, and may return.

    A step that only some members have finished is repeated without waiting for them.
    """
    known = -1 if newest is None else newest + 1
    here, ranks = {each.uid for each in found}, state.group.ranks
    # Without one of its members, the last generation has trained on for some time.
    is_bound = not here.isdisjoint(ranks)
    timeout = state.settings.timeout
    return any(
        (_steps(each) > known or (each.uid in ranks and not is_bound))
        and each.uid not in here
        and (each.gone is None or state.clock - each.gone <= timeout)
        for each in state.workers.values()
    )


def _may_still_train(state: LeadState, found: list[KnownWorker]) -> bool:
    """Whether all members of the last generation may train on, without the lead."""
    ranks = state.group.ranks
    if any(each.uid in ranks for each in found):
        return False
    lease = LEASE * state.settings.timeout
    return any(state.clock - each.seen <= lease for each in state.members)


def _begin(
    state: LeadState, chosen: list[KnownWorker], newest: int | None, out: Out
) -> LeadState:
    """Begins a generation; the first worker is its chief and has the newest state."""
    before, begun = state.group, newest or 0
    ranks = {each.uid: rank for rank, each in enumerate(chosen)}
    earlier = dict(zip(before.ranks, before.indices, strict=True))
    indices = tuple(each.index for each in chosen)
    hosts = {host: i for i, host in enumerate(dict.fromkeys(w.host for w in chosen))}
    body = {
        "generation": before.number + 1,
        "step": begun,
        "is_first": newest is None,
        "members": indices,
        "hosts": list(hosts),
        "places": [hosts[each.host] for each in chosen],
        "pids": [each.pid for each in chosen],
        "behind": [rank for rank, each in enumerate(chosen) if each.step != newest],
        "lost": [i for uid, i in earlier.items() if uid not in ranks],
        "joined": [w.index for w in chosen if earlier and w.uid not in earlier],
        "how": before.how,
    }
    out.tell(ranks, "begin", **body)
    group = GenerationState(
        before.number + 1,
        ranks,
        indices,
        begun,
        Phase.SYNCING,
        frozenset(ranks),
        state.clock,
        failures=before.failures if begun == before.step else 0,
    )
    waiting = state.waiting - ranks.keys()
    return replace(_without_waits(state), group=group, waiting=waiting)


def _go(state: LeadState, out: Out) -> LeadState:
    """Lets a generation run, whose members all hold the state."""
    out.tell(state.group.ranks, "go", generation=state.group.number)
    state = state.with_group(phase=Phase.RUNNING, since=state.clock)
    state = replace(state, has_run=True)
    return _pause(state, out) if state.is_stop_asked else _admit(state, out)


def holds(state: LeadState, event: Holds, out: Out) -> LeadState:
    """Members have the state."""
    group = state.group
    is_current = event.generation == group.number and group.phase is Phase.SYNCING
    uids = group.awaited.intersection((event.uid, *event.others))
    if not is_current or not uids:
        return state
    state = state.with_workers(*uids, step=event.step)
    return advance(state.with_group(awaited=group.awaited - uids), out)


def ready(state: LeadState, event: Ready, out: Out) -> LeadState:
    """Workers wait for a generation."""
    group, settings = state.group, state.settings
    uids = [uid for uid in (event.uid, *event.others) if uid in state.workers]
    if state.has_run and not settings.rejoin:
        for uid in [each for each in uids if each not in group.ranks]:
            uids.remove(uid)
            state = _without_newcomer(state, uid, out)
    if not uids:
        return state
    state = state.with_workers(*uids, step=event.step, admits=event.admits)
    state = state.left_phase(*uids)
    state = replace(state, waiting=state.waiting.union(uids))
    is_planned = group.phase is Phase.STOPPING and event.is_planned
    members = [uid for uid in uids if uid in group.ranks]
    if group.is_active and members and not is_planned:
        how = f"{state.workers[members[0]]} could not continue"
        if group.failures >= settings.failures:
            return over(state, f"{how}, {group.failures} times in a row.", out)
        failed = state.with_group(failures=group.failures + 1)
        state = end(failed, set(), how, out)
    return advance(state, out)


def _without_newcomer(state: LeadState, uid: str, out: Out) -> LeadState:
    why = (
        f"Worker {state.workers[uid].index} cannot join: the others train with "
        "`Elastic(rejoin=False)`. Restart all workers, or set `rejoin=True`."
    )
    tell_over((uid,), why, out)
    return state.without(uid)


# Joins, and stops after a common step


def _admit(state: LeadState, out: Out) -> LeadState:
    """Makes a running generation stop at a common step, if a worker can join it."""
    if not state.waiting:
        return state
    members = [each for each in state.members if each.gone is None]
    taken = {each.index for each in members}
    waiting = [state.workers[uid] for uid in state.waiting]
    joins = any(w.index not in taken and state.is_present(w) for w in waiting)
    if not joins or len(members) >= state.settings.most:
        return state
    return _pause(state, out)


def stop(state: LeadState, event: Stop, out: Out) -> LeadState:
    """A worker asks all to stop after the same step."""
    state = replace(state, is_stop_asked=True)
    return _pause(state, out) if state.group.phase is Phase.RUNNING else state


def _pause(state: LeadState, out: Out) -> LeadState:
    members = uids_of(state.members)
    out.tell(members, "pause", generation=state.group.number)
    return state.with_group(
        phase=Phase.PAUSING,
        awaited=frozenset(members),
        since=state.clock,
        last_step=0,
    )


def begun(state: LeadState, event: Begun, out: Out) -> LeadState:
    """A member says which steps it has begun."""
    group = state.group
    is_current = event.generation == group.number and group.phase is Phase.PAUSING
    if not is_current or event.uid not in group.awaited:
        return state
    last, awaited = max(group.last_step, event.steps), group.awaited - {event.uid}
    return advance(state.with_group(last_step=last, awaited=awaited), out)


def _stop_after(state: LeadState, out: Out) -> LeadState:
    members, group = uids_of(state.members), state.group
    facts = {"generation": group.number, "count": group.last_step}
    out.tell(members, "stop_after", **facts)
    state = replace(state, is_stop_asked=False)
    if state.settings.is_fixed:
        return state.with_group(phase=Phase.RUNNING, since=state.clock)
    return state.with_group(
        phase=Phase.STOPPING,
        awaited=frozenset(members),
        since=state.clock,
        how="the number of workers changes",
    )


def _stopped(state: LeadState, out: Out) -> LeadState:
    return _form(state.with_group(phase=Phase.FORMING, since=state.clock), out)


_NEXT: dict[Phase, Callable[[LeadState, Out], LeadState]] = {
    Phase.FORMING: _form,
    Phase.SYNCING: _go,
    Phase.PAUSING: _stop_after,
    Phase.STOPPING: _stopped,
}

# Errors


def no_state(state: LeadState) -> str:
    """The error when the state of training is lost."""
    return (
        f"No worker has the state of training any longer. {_sentence(state.group.how)} "
        f"Start all workers again; {_resume(state)}"
    )


def _older_than_snapshot(state: LeadState, newest: int) -> str:
    return (
        f"The workers that are left have the state after action {newest}, which is "
        f"older than the last snapshot. {_sentence(state.group.how)} Start all workers "
        f"again; {_resume(state)}"
    )


def _sentence(text: str) -> str:
    return text if not text or text.endswith(".") else f"{text[0].upper()}{text[1:]}."


def _resume(state: LeadState) -> str:
    if state.snapshot is None:
        return "with ks.callbacks.Resume they continue at their last snapshot."
    return f"they continue at the last snapshot, {state.snapshot[1]!r}."


def _too_few(state: LeadState, found: list[KnownWorker]) -> str:
    settings, here = state.settings, {each.index for each in found}
    missing = [i for i in range(settings.workers) if i not in here]
    if settings.is_fixed:
        return (
            f"Of {settings.workers} workers, {settings.named(missing)} did not connect "
            f"within {settings.patience:g} s. Check that it was started with the same "
            "cluster and can reach the lead. "
            "`CommunicationOptions(timeout_seconds=...)` sets this timeout."
        )
    return (
        f"{len(found)} of {settings.workers} workers are connected after "
        f"{settings.patience:g} s, without {settings.named(missing) or 'new ones'}. At "
        f"least {settings.min_workers} are needed (`ks.Elastic(min_workers=...)`)."
    )
