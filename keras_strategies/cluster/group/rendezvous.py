"""Rendezvous of elastic workers: leader election and members of each generation.

# Protocol

Every worker listens at its own address of the cluster for as long as it runs, so that
there is no fixed chief. When a generation of workers ends, each of its workers votes
for the first one, in the order of ranks, that is alive: it connects to that worker and
waits. A worker that finds none before itself leads. The leader probes the workers that
have not voted:

- connection refused: the process has ended;
- no answer within the timeout: the process is stopped, and excluded;
- no connection within the timeout: the network may be partitioned. The group continues
  only if it has more members than there are such workers, or as many and the first of
  all of them. So of two partitions at most one continues. The worker counts until it
  answers: the other partition may have continued with it before it ended;
- an answer: the worker is busy with a step; the probe ends its generation.

A leader that was stopped itself probes all workers of the cluster: those of its
generation may have continued with others, and be lost by now. It then joins these.

Then the leader, now the chief, makes the votes' connections those of the new group (see
`Hub.over`). New workers use the same message: a running worker redirects them to the
chief, where they wait for the next generation.

Votes carry the last finished step of a worker; a worker without training state has
none. A process without training state does not lead workers that have it: it may have
the index of a lost one, and answers their votes with `new`, so that they pass over it.
A new worker waits once it is ready to train: before that, it detects that the others
train, and forms no group. New workers begin after a step at which the furthest worker
admits them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from keras_strategies.cluster.group.group_messages import BEAT, MessageConnection
from keras_strategies.cluster.group.hub import Hub
from keras_strategies.cluster.group.rendezvous_listener import (
    FORMING,
    JOINING,
    RUNNING,
    Candidate,
    RendezvousListener,
    duplicate,
)
from keras_strategies.cluster.group.worker_probes import (
    ALIVE,
    STOPPED,
    UNREACHABLE,
    ProbeResult,
    WorkerProbes,
    state_of,
)
from keras_strategies.errors import ClusterError, WorkerError

_TICK = BEAT / 5


@dataclass(frozen=True)
class Formed:
    """A new generation, as its leader has sent it.

    Args:
        connection: the connection to the hub.
        hub: the hub, in the chief's process.
        facts: dict, the message of the leader.
    """

    connection: MessageConnection
    hub: Hub | None
    facts: dict[str, Any]


class GroupIsRunningError(Exception):
    """The other workers train already, and this one is not ready to join them."""


class Rendezvous:
    """One worker's part in the rendezvous of all generations.

    Args:
        listener: `RendezvousListener` of this worker.
    """

    def __init__(self, listener: RendezvousListener):
        self._own = listener
        self._step: int | None = None
        self._is_ready = True
        self._admits = True
        #: Whether this worker only joins a group that trains, and forms none itself.
        self.only_joins = False
        self._probes = WorkerProbes(listener, lambda: self._hello("probe"))

    def form(
        self,
        step: int | None,
        silent: int | None = None,
        *,
        is_ready: bool = True,
        admits: bool = True,
    ) -> Formed:
        """Forms the next generation with all workers that are alive.

        Args:
            step: int, the last finished step of this worker; None without a state.
            silent: int or None, a worker that has sent no heartbeat for the timeout.
            is_ready: bool, whether this worker can join a group that trains.
            admits: bool, whether new workers can begin after `step`.

        Returns:
            `Formed`.

        Raises:
            ClusterError: if workers differ, or two have one index.
            GroupIsRunningError: if the others train and this worker is not ready.
            WorkerError: if there are fewer workers than the minimum for too long.
        """
        with self._own.changed:
            self._step, self._is_ready, self._admits = step, is_ready, admits
            self._probes.reset(silent)
            self._own.target = self._own.generation + 1
        skipped: set[int] = set()
        while True:
            formed = self._attempt(skipped)
            if formed is not None:
                self._own.run(formed.facts)
                return formed
            time.sleep(_TICK)

    def _order(self) -> list[int]:
        """The workers of the previous generation; all of them at the start."""
        with self._own.changed:
            return list(self._own.previous) or list(range(len(self._own.addresses)))

    def _attempt(self, skipped: set[int]) -> Formed | None:
        with self._own.changed:
            self._own.phase, self._own.chief = FORMING, None
        order = self._order()
        for index in order[: order.index(self._own.index)]:
            if index in skipped:
                continue
            formed, is_passed = self._follow(index)
            if not is_passed:
                return formed
            skipped.add(index)
        skipped.clear()
        formed, chief = self._lead()
        self._probes.stopped.clear()
        return formed if chief is None else self._follow(chief)[0]

    def _hello(self, kind: str) -> dict[str, Any]:
        with self._own.changed:
            return {
                "kind": kind,
                "job": self._own.job,
                "index": self._own.index,
                "uid": self._own.uid,
                "target": self._own.target,
                "previous": list(self._own.previous.items()),
                "step": self._step,
                "is_ready": self._is_ready,
                "admits": self._admits,
                "info": self._own.info,
            }

    def _follow(self, index: int) -> tuple[Formed | None, bool]:
        """Waits for a generation that another worker leads.

        Returns:
            The generation, if it was formed, and whether to pass over this worker;
            otherwise to begin again with the first one.
        """
        try:
            connection = self._probes.connect(index)
        except OSError:
            return None, True
        with self._own.changed:
            self._own.chief = index
        connection.send(self._hello("vote"))
        try:
            if not connection.wait(self._probes.answer_time(index)):
                if self._probes.without_answer(index).state == STOPPED:
                    self._probes.stopped.add(index)
                connection.abort()
                return None, True
            header = self._wait_for_leader(connection, index)
        except EOFError:
            connection.abort()
            return None, False
        except GroupIsRunningError:
            connection.abort()
            raise
        if header is not None and header["kind"] == "welcome":
            return Formed(connection, None, header), False
        connection.abort()
        if header is None or header["kind"] in ("wrong_job", "new"):
            return None, True
        if header["kind"] == "refused":
            error = WorkerError if header["is_late"] else ClusterError
            raise error(header["why"])
        if header["chief"] == self._own.index:
            return None, False
        formed, _ = self._follow(header["chief"])
        return formed, False

    def _wait_for_leader(
        self, connection: MessageConnection, index: int
    ) -> dict[str, Any] | None:
        """The decisive message of a worker; None if it is stopped or does not lead."""
        since = time.monotonic()
        while time.monotonic() - since < self._own.limits.patience:
            received = connection.receive(self._own.limits.timeout)
            if received is None:
                return None
            header = received[0]
            if header["kind"] not in ("wait", "moved"):
                return header
            is_running = header["phase"] == RUNNING
            self._check_ready(is_running, header["generation"])
            if is_running and header["generation"] >= self._own.target:
                self._join_as_new()
            if header["chief"] not in (None, index):
                return header
            if header["leads"] or (is_running and self._own.phase == JOINING):
                since = time.monotonic()
        return None

    def _check_ready(self, is_running: bool, generation: int) -> None:
        is_newer = generation >= self._own.target
        if is_running and is_newer and not self._is_ready:
            raise GroupIsRunningError

    def _join_as_new(self) -> None:
        """Discards this worker's old state: a generation has formed without it."""
        with self._own.changed:
            self._own.phase = JOINING
            self._own.target, self._own.previous, self._step = 0, {}, None

    def _lead(self) -> tuple[Formed | None, int | None]:
        """Collects votes.

        Returns:
            The generation, or the worker to follow, or None to begin again.
        """
        ended = threading.Event()
        findings = {index: ProbeResult(STOPPED) for index in self._probes.stopped}
        with self._own.changed:
            self._own.leads = True
        connection = self._probes.connect(self._own.index)
        try:
            connection.send(self._hello("vote"))
            outsiders = self._outsiders()
            for index in (*self._others(), *outsiders):
                self._own.start(self._probes.repeat, index, findings, ended)
            formed, chief = self._collect(connection, findings, outsiders)
        except BaseException:
            connection.abort()
            raise
        finally:
            ended.set()
            with self._own.changed:
                self._own.leads = False
        if formed is None:
            connection.abort()
            self._own.drop_candidates()
        return formed, chief

    def _collect(
        self,
        connection: MessageConnection,
        findings: dict[int, ProbeResult],
        outsiders: Sequence[int],
    ) -> tuple[Formed | None, int | None]:
        begin, target = time.monotonic(), self._own.target
        while self._own.target == target:
            with self._own.changed:
                self._own.changed.wait(_TICK)
                found = dict(findings)
            chief = self._other_chief(found)
            if chief is not None:
                return None, chief if chief >= 0 else None
            waited = time.monotonic() - begin
            # Not before it is clear whether they train.
            if waited < self._own.limits.patience and {*outsiders} - found.keys():
                continue
            hub = self._commit(found, waited)
            if hub is not None:
                return Formed(connection, hub, self._own_welcome(connection)), None
        return None, None

    def _own_welcome(self, connection: MessageConnection) -> dict[str, Any]:
        while True:
            received = connection.receive()
            if received is not None and received[0]["kind"] == "welcome":
                return received[0]

    def _others(self) -> list[int]:
        return [index for index in self._order() if index != self._own.index]

    def _outsiders(self) -> list[int]:
        """Workers that may train in a generation after that of this process.

        While it was stopped, the others of its generation may have continued with these
        workers, and be lost by now.
        """
        with self._own.changed:
            if not self._own.was_stopped() or not self._own.previous:
                return []
            every = range(len(self._own.addresses))
            return [index for index in every if index not in self._own.previous]

    def _other_chief(self, findings: dict[int, ProbeResult]) -> int | None:
        """A worker to follow: its index, or -1 for the first that is alive."""
        order = self._order()
        own = order.index(self._own.index)
        for index, found in findings.items():
            answer = found.answer
            if answer.get("kind") != "alive":
                continue
            self._check_ready(answer["phase"] == RUNNING, answer["generation"])
            if answer["phase"] in (RUNNING, JOINING):
                is_newer = answer["generation"] >= self._own.target
                if is_newer and answer["phase"] == RUNNING:
                    self._join_as_new()
                chief = answer["chief"]
                # This process may have replaced the chief that was lost.
                is_other = chief not in (None, self._own.index)
                if is_other and (is_newer or self._own.target == 0):
                    return int(chief)
            elif self._own.target == 0 < answer["target"]:
                return index
            elif answer["target"] == 0 < self._own.target:
                continue
            elif index not in order:
                if answer["target"] > self._own.target:
                    return -1
            elif answer["phase"] == FORMING and order.index(index) < own:
                return -1
        return None

    def _commit(self, findings: dict[int, ProbeResult], waited: float) -> Hub | None:
        """Forms the generation, if it is clear which workers are alive.

        Raises:
            WorkerError: if there are too few for too long.
        """
        is_late = waited > self._own.limits.patience
        with self._own.changed:
            candidates = list(self._own.candidates.values())
            previous = dict(self._own.previous)
        if self._own.uid not in {each.uid for each in candidates}:
            return None
        for each in candidates:
            is_new = bool(previous) and each.uid not in previous.values()
            check = self._own.refusal if is_new else self._own.difference
            refusal = check(each)
            if refusal is not None and not previous:
                self._refuse_all(**refusal)
            if refusal is not None:
                self._own.refuse(each, **refusal)
                return None
        voters, newcomers = self._sorted(candidates, previous)
        if previous:
            admits = max(voters, key=lambda each: _steps_of(each)).admits
            newcomers = [each for each in newcomers if each.is_ready and admits]
        missing = [i for i in self._others() if i not in {v.index for v in voters}]
        limit = self._own.limits.max_workers or len(self._own.addresses)
        if previous:
            lost = [i for i in missing if self._is_lost(findings.get(i), previous[i])]
            is_clear = lost == missing
        else:
            is_clear = not missing or len(voters) >= limit
        if not is_clear and not is_late:
            return None
        # This worker is the first, since the hub is in its process.
        voters.sort(key=lambda voter: voter.uid != self._own.uid)
        chosen = (voters + newcomers)[: max(limit, len(voters) if previous else 0)]
        with self._own.changed:
            was_unreachable = set(self._probes.unreachable)
        is_now = {i for i in missing if state_of(findings, i) == UNREACHABLE}
        unreachable = [i for i in missing if i in is_now | was_unreachable]
        is_quorum = not previous or _is_quorum([v.index for v in voters], unreachable)
        is_enough = len(chosen) >= self._own.limits.min_workers
        if is_enough and is_quorum and (previous or not self.only_joins):
            return self._welcome(chosen, previous)
        if is_late:
            self._refuse_all(
                self._too_few(chosen, missing, unreachable, is_quorum), is_late=True
            )
        return None

    def _is_lost(self, found: ProbeResult | None, uid: str) -> bool:
        if found is None:
            return False
        if found.state == ALIVE:
            # Another process has taken its place.
            return bool(found.answer.get("uid") != uid)
        return True

    def _sorted(
        self, candidates: list[Candidate], previous: dict[int, str]
    ) -> tuple[list[Candidate], list[Candidate]]:
        """Workers of the previous generation in its order, and new ones."""
        first: dict[int, Candidate] = {}
        for each in sorted(candidates, key=lambda each: each.since):
            other = first.setdefault(each.index, each)
            if other is each:
                continue
            if not previous:
                self._refuse_all(duplicate(each.index), is_late=False)
            is_voter = previous.get(each.index) == each.uid
            if is_voter:
                first[each.index] = each
            extra = other if is_voter else each
            self._own.refuse(extra, duplicate(each.index), is_late=False)
        voters = [
            first[index]
            for index in self._order()
            if index in first
            and previous.get(index, first[index].uid) == first[index].uid
        ]
        is_voter_at = {each.index for each in voters}
        newcomers = [first[i] for i in sorted(first) if i not in is_voter_at]
        return voters, newcomers

    def _refuse_all(self, why: str, *, is_late: bool) -> None:
        with self._own.changed:
            candidates = list(self._own.candidates.values())
        for each in candidates:
            self._own.refuse(each, why, is_late=is_late)
        raise (WorkerError if is_late else ClusterError)(why)

    def _too_few(
        self,
        chosen: list[Candidate],
        missing: list[int],
        unreachable: list[int],
        is_quorum: bool,
    ) -> str:
        named = " and ".join(f"worker {i} ({self._own.addresses[i]})" for i in missing)
        text = (
            f"{len(chosen)} of {len(self._own.addresses)} workers are connected after "
            f"{self._own.limits.patience:g} s, without {named or 'new ones'}. "
        )
        if self.only_joins:
            return text + (
                "The workers that trained have ended, so this one cannot join them. "
                "Restart all workers."
            )
        if not is_quorum:
            return text + (
                f"{len(unreachable)} cannot be reached and may continue without this "
                "one; only the larger part of a group continues. Check the network "
                "between the workers, and restart this one."
            )
        return text + (
            f"At least {self._own.limits.min_workers} are needed "
            "(`ks.Elastic(min_workers=...)`)."
        )

    def _welcome(self, chosen: list[Candidate], previous: dict[int, str]) -> Hub | None:
        """The hub of the chosen workers; None if one has just ended."""
        infos = []
        for each in chosen:
            is_old = not previous or previous.get(each.index) == each.uid
            step = each.step if is_old else None
            infos.append(
                {**each.info, "index": each.index, "uid": each.uid, "step": step}
            )
        hub = Hub.over(
            [each.connection for each in chosen], infos, self._own.limits.timeout
        )
        facts = {"generation": self._own.target, "previous": list(previous.items())}
        with self._own.changed:
            waiting = list(map(id, self._own.candidates.values()))
            if not all(id(each) in waiting for each in chosen):
                return None
            # The welcome is the first message to each worker.
            hub.welcome(facts)
            for rank, each in enumerate(chosen):
                del self._own.candidates[each.uid]
                each.rank, each.hub = rank, hub
        return hub


def _steps_of(candidate: Candidate) -> int:
    return -1 if candidate.step is None else candidate.step


def _is_quorum(present: list[int], unreachable: list[int]) -> bool:
    """Whether a group may continue although unreachable workers may form another one.

    >>> _is_quorum([0, 1], [2]), _is_quorum([2], [0, 1])
    (True, False)
    >>> _is_quorum([0], [1]), _is_quorum([1], [0])
    (True, False)
    """
    if len(present) != len(unreachable):
        return len(present) > len(unreachable)
    return min(present) < min(unreachable)
