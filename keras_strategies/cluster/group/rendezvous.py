"""Rendezvous of elastic workers: leader election and members of each generation.

# Protocol

Every worker listens at its own address of the cluster for as long as it runs, so that
there is no fixed chief. When a generation of workers ends, each of its workers votes
for the first one, in the order of ranks, that is alive: it connects to that worker and
waits. A worker that finds none before itself leads. The leader probes the workers that
have not voted:

- connection refused: the process has ended;
- no answer within the timeout: the process is stopped, and excluded;
- no connection within the timeout: the network may be cut. The group continues only if
  it has more members than there are such workers, or as many and the first of all of
  them. So of two halves of a network at most one continues;
- an answer: the worker is busy with a step; the probe ends its generation.

Then the leader, now the chief, makes the votes' connections those of the new group (see
`Hub.over`). New workers use the same message: a running worker redirects them to the
chief, where they wait for the next generation.

Votes carry the last finished step of a worker; a worker without training state has
none.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

from keras_strategies.cluster.group.group_messages import BEAT, MessageConnection
from keras_strategies.cluster.group.hub import Hub
from keras_strategies.cluster.spec import split_address
from keras_strategies.errors import ClusterError, WorkerError
from keras_strategies.types import Elastic

_TICK = BEAT / 5
_STARTING, _FORMING, _JOINING, _RUNNING = "starting", "forming", "joining", "running"
_DEAD, _STOPPED, _UNREACHABLE, _ALIVE = "dead", "stopped", "unreachable", "alive"
# A host that answers, but without a listener at the port.
_REFUSED = (errno.ECONNREFUSED, errno.ECONNRESET)


@dataclass(frozen=True)
class Formed:
    """A new generation, as its leader has sent it.

    Args:
        line: the connection to the hub.
        hub: the hub, in the chief's process.
        facts: dict, the message of the leader.
    """

    line: MessageConnection
    hub: Hub | None
    facts: dict[str, Any]


@dataclass
class _Candidate:
    """A worker that waits for the next generation."""

    line: MessageConnection
    index: int
    uid: str
    step: int | None
    info: dict[str, Any]
    since: float = field(default_factory=time.monotonic)
    hub: Hub | None = None
    rank: int = -1


@dataclass
class _Finding:
    """Result of a probe."""

    state: str
    answer: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Limits:
    """Numbers and times of an elastic group.

    Args:
        min_workers: int, the smallest group.
        max_workers: int or None, the largest one.
        rejoin: bool, whether workers may join after the start.
        timeout: float, seconds without an answer after which a worker is excluded.
        patience: float, seconds to wait for busy workers and for `min_workers`.
    """

    min_workers: int
    max_workers: int | None
    rejoin: bool
    timeout: float
    patience: float

    @classmethod
    def of(cls, elastic: Elastic, count: int, timeout: float) -> Self:
        """The limits of a cluster.

        Args:
            elastic: `Elastic`.
            count: int, the workers of the cluster.
            timeout: float, seconds between heartbeats.

        Raises:
            ClusterError: if the cluster has fewer than `min_workers`.
        """
        if elastic.min_workers > count:
            raise ClusterError(
                f"`Elastic(min_workers={elastic.min_workers})` needs more workers than "
                f"the cluster describes: {count}. Add workers to the cluster, or lower "
                "`min_workers`."
            )
        return cls(
            elastic.min_workers,
            elastic.max_workers,
            elastic.rejoin,
            timeout,
            elastic.timeout_seconds,
        )


class Rendezvous:
    """One worker's part in the rendezvous of all generations.

    Args:
        addresses: the addresses of all workers; this worker listens at its own.
        index: int, the number of this worker.
        same: dict of values that must agree on all workers, by name.
        info: dict, further information for the other workers.
        job: str, identifies this cluster among others at the same addresses.
        limits: `Limits`.
        on_end: called on a thread when the other workers end this generation.
        on_newcomer: called on a thread of the chief when a worker waits to join.

    Raises:
        ValueError: if this worker cannot listen at its address.
    """

    def __init__(
        self,
        addresses: list[str],
        index: int,
        same: dict[str, Any],
        info: dict[str, Any],
        job: str,
        limits: Limits,
        on_end: Callable[[], None],
        on_newcomer: Callable[[], None],
    ):
        self._addresses = addresses
        self.index = index
        self.uid = f"{os.getpid()}-{secrets.token_hex(8)}"
        same = json.loads(json.dumps(same))
        self._info = {**info, "same": same, "pid": os.getpid()}
        self._job = job
        self._limits = limits
        self._on_end = on_end
        self._on_newcomer = on_newcomer
        self._changed = threading.Condition()
        self._phase = _STARTING
        self.generation = -1
        # The generation to form, and the workers of the previous one, in the order of
        # ranks: index and uid.
        self._target = 0
        self._previous: dict[int, str] = {}
        self._step: int | None = None
        # A worker that has sent no heartbeat for the timeout.
        self._silent: int | None = None
        # Workers that have accepted a connection since, but have not answered.
        self._stopped: set[int] = set()
        self._leads = False
        # The worker to which others are redirected.
        self._chief: int | None = None
        self._candidates: dict[str, _Candidate] = {}
        self._closed = threading.Event()
        self._server = self._listen()
        self._start(self._accept)
        self._start(self._send_beats)

    def _start(self, target: Callable[..., None], *args: Any) -> None:
        threading.Thread(
            target=target, args=args, name="group-rendezvous", daemon=True
        ).start()

    def _listen(self) -> socket.socket:
        host, port = split_address(self._addresses[self.index])
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            return socket.create_server((host, port), family=family, backlog=128)
        except OSError as error:
            raise ClusterError(
                f"Worker {self.index} cannot listen at {host}:{port}: "
                f"{error.strerror or error}. Elastic workers listen at their own "
                "address of the cluster; check that it is an address of this machine "
                "and that no other program uses the port."
            ) from error

    def close(self) -> None:
        """Ends the listener; waiting workers see the end of their connection."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self._drop_candidates()

    # Messages of other workers.

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                connected, _ = self._server.accept()
            except OSError:
                return
            self._start(self._connected, connected)

    def _connected(self, connected: socket.socket) -> None:
        try:
            line = MessageConnection(connected)
            message = line.receive(self._limits.timeout)
        except (OSError, EOFError):
            return
        header = message[0] if message is not None else {}
        if header.get("job") != self._job:
            line.send({"kind": "wrong_job"})
        elif header["kind"] == "probe":
            self._note(header)
            line.send(self._state("alive"))
        elif header["kind"] == "vote":
            self._note(header)
            self._vote(line, header)
            return
        line.close()

    def _state(self, kind: str) -> dict[str, Any]:
        with self._changed:
            return {
                "kind": kind,
                "uid": self.uid,
                "phase": self._phase,
                "generation": self.generation,
                "target": self._target,
                "leads": self._leads,
                "chief": self.index if self._leads else self._chief,
            }

    def _note(self, header: dict[str, Any]) -> None:
        """Notices that the generation of this worker has ended."""
        previous = {int(index): uid for index, uid in header["previous"]}
        with self._changed:
            is_of_mine = previous.get(self.index) == self.uid
            is_newer = header["target"] > self._target
            ends = self._phase == _RUNNING and header["target"] > self.generation
            if is_of_mine and self._phase == _FORMING and is_newer:
                self._target, self._previous = header["target"], previous
                self._changed.notify_all()
        if is_of_mine and ends:
            self._on_end()

    def _vote(self, line: MessageConnection, header: dict[str, Any]) -> None:
        info = {**header["info"], "host": line.other_host}
        candidate = _Candidate(
            line, int(header["index"]), header["uid"], header["step"], info
        )
        with self._changed:
            answer = self._answer(candidate)
            if answer is None:
                self._candidates[candidate.uid] = candidate
                self._changed.notify_all()
            is_new = self._phase == _RUNNING and candidate.uid not in self._uids()
        if answer is not None:
            line.send(answer)
            line.close()
            return
        if is_new:
            self._on_newcomer()
        received = None
        try:
            while candidate.hub is None:
                received = line.receive(BEAT)
        except EOFError:
            with self._changed:
                self._candidates.pop(candidate.uid, None)
                self._changed.notify_all()
        if candidate.hub is not None:
            candidate.hub.serve(candidate.rank, line, received)
        line.close()

    def _uids(self) -> set[str]:
        return set(self._previous.values())

    def _answer(self, candidate: _Candidate) -> dict[str, Any] | None:
        """Answer to a vote; None for a candidate that waits. The lock is held."""
        if self._phase in (_STARTING, _FORMING) or candidate.uid in self._uids():
            return None
        if self._phase == _JOINING or self._chief != self.index:
            return self._state("moved")
        if not self._limits.rejoin:
            why = "The workers train with `rejoin=False`: no worker can join."
            return {"kind": "refused", "why": why, "is_late": True}
        return self._difference(candidate)

    def _difference(self, candidate: _Candidate) -> dict[str, Any] | None:
        """Refusal of a worker with other versions or settings."""
        for key, value in self._info["same"].items():
            found = candidate.info["same"].get(key)
            if found != value:
                why = (
                    f"Workers disagree on {key}: worker {self.index} has {value!r}, "
                    f"worker {candidate.index} has {found!r}. Run the same script "
                    "with the same versions on all workers."
                )
                return {"kind": "refused", "why": why, "is_late": False}
        return None

    def _send_beats(self) -> None:
        while not self._closed.wait(BEAT):
            # With the lock, so that none follows the welcome.
            with self._changed:
                waiting = list(self._candidates.values())
                members = self._previous if self._phase == _RUNNING else {}
                state = self._state("wait")
                for candidate in waiting:
                    candidate.line.send(state)
            for candidate in waiting:
                waited = time.monotonic() - candidate.since
                if candidate.index in members and waited > 2 * self._limits.timeout:
                    self._refuse(candidate, _duplicate(candidate.index), is_late=False)

    def _refuse(self, candidate: _Candidate, why: str, *, is_late: bool) -> None:
        with self._changed:
            self._candidates.pop(candidate.uid, None)
        candidate.line.send({"kind": "refused", "why": why, "is_late": is_late})
        candidate.line.close()

    def _drop_candidates(self) -> None:
        """Makes waiting workers vote again."""
        with self._changed:
            waiting = list(self._candidates.values())
            self._candidates.clear()
        for candidate in waiting:
            candidate.line.close()

    @property
    def joining(self) -> int:
        """The number of workers that wait at the chief and may become members."""
        with self._changed:
            members = self._previous if self._phase == _RUNNING else {}
            waiting = {each.index for each in self._candidates.values()}
            limit = self._limits.max_workers or len(self._addresses)
            return min(len(waiting - set(members)), limit - len(members))

    # Forming a generation.

    def form(self, step: int | None, silent: int | None = None) -> Formed:
        """Forms the next generation with all workers that are alive.

        Args:
            step: int, the last finished step of this worker; None without a state.
            silent: int or None, a worker that has sent no heartbeat for the timeout.

        Returns:
            `Formed`.

        Raises:
            ClusterError: if workers differ, or two have one index.
            WorkerError: if there are fewer workers than the minimum for too long.
        """
        with self._changed:
            self._step, self._silent = step, silent
            self._stopped.clear()
            self._target = self.generation + 1
        skipped: set[int] = set()
        while True:
            formed = self._attempt(skipped)
            if formed is not None:
                self._run(formed)
                return formed
            time.sleep(_TICK)

    def _run(self, formed: Formed) -> None:
        facts = formed.facts
        with self._changed:
            self._phase = _RUNNING
            self.generation = facts["generation"]
            members = facts["members"]
            self._previous = {each["index"]: each["uid"] for each in members}
            self._chief = members[0]["index"]
            self._leads = False
            is_chief = self._chief == self.index
        if not is_chief:
            self._drop_candidates()
        elif self.joining > 0:
            self._on_newcomer()

    def _order(self) -> list[int]:
        """The workers of the previous generation; all of them at the start."""
        with self._changed:
            return list(self._previous) or list(range(len(self._addresses)))

    def _attempt(self, skipped: set[int]) -> Formed | None:
        with self._changed:
            self._phase, self._chief = _FORMING, None
        order = self._order()
        for index in order[: order.index(self.index)]:
            if index in skipped:
                continue
            formed, is_passed = self._follow(index)
            if not is_passed:
                return formed
            skipped.add(index)
        skipped.clear()
        formed, chief = self._lead()
        self._stopped.clear()
        return formed if chief is None else self._follow(chief)[0]

    def _hello(self, kind: str) -> dict[str, Any]:
        with self._changed:
            return {
                "kind": kind,
                "job": self._job,
                "index": self.index,
                "uid": self.uid,
                "target": self._target,
                "previous": list(self._previous.items()),
                "step": self._step,
                "info": self._info,
            }

    def _answer_time(self, index: int) -> float:
        """Seconds to wait for the first answer of a worker."""
        timeout = self._limits.timeout
        return min(timeout, 2 * BEAT) if index == self._silent else timeout

    def _dial(self, index: int) -> MessageConnection:
        host, port = split_address(self._addresses[index])
        return MessageConnection(
            socket.create_connection((host, port), timeout=self._limits.timeout)
        )

    def _follow(self, index: int) -> tuple[Formed | None, bool]:
        """Waits for a generation that another worker leads.

        Returns:
            The generation, if it was formed, and whether to pass over this worker;
            otherwise to begin again with the first one.
        """
        try:
            line = self._dial(index)
        except OSError:
            return None, True
        with self._changed:
            self._chief = index
        line.send(self._hello("vote"))
        try:
            if not line.wait(self._answer_time(index)):
                self._stopped.add(index)
                line.abort()
                return None, True
            header = self._wait_for_leader(line, index)
        except EOFError:
            line.abort()
            return None, False
        if header is not None and header["kind"] == "welcome":
            return Formed(line, None, header), False
        line.abort()
        if header is None or header["kind"] == "wrong_job":
            return None, True
        if header["kind"] == "refused":
            error = WorkerError if header["is_late"] else ClusterError
            raise error(header["why"])
        if header["chief"] == self.index:
            return None, False
        formed, _ = self._follow(header["chief"])
        return formed, False

    def _wait_for_leader(
        self, line: MessageConnection, index: int
    ) -> dict[str, Any] | None:
        """The decisive message of a worker; None if it is stopped or does not lead."""
        since = time.monotonic()
        while time.monotonic() - since < self._limits.patience:
            received = line.receive(self._limits.timeout)
            if received is None:
                return None
            header = received[0]
            if header["kind"] not in ("wait", "moved"):
                return header
            is_running = header["phase"] == _RUNNING
            if is_running and header["generation"] >= self._target:
                self._join_as_new()
            if header["chief"] not in (None, index):
                return header
            if header["leads"] or (is_running and self._phase == _JOINING):
                since = time.monotonic()
        return None

    def _join_as_new(self) -> None:
        """Notes that a generation has formed without this worker: its state is old."""
        with self._changed:
            self._phase = _JOINING
            self._target, self._previous, self._step = 0, {}, None

    def _lead(self) -> tuple[Formed | None, int | None]:
        """Collects votes.

        Returns:
            The generation, or the worker to follow, or None to begin again.
        """
        ended = threading.Event()
        findings = {index: _Finding(_STOPPED) for index in self._stopped}
        with self._changed:
            self._leads = True
        line = self._dial(self.index)
        try:
            line.send(self._hello("vote"))
            for index in self._others():
                self._start(self._probe_often, index, findings, ended)
            formed, chief = self._collect(line, findings)
        except BaseException:
            line.abort()
            raise
        finally:
            ended.set()
            with self._changed:
                self._leads = False
        if formed is None:
            line.abort()
            self._drop_candidates()
        return formed, chief

    def _collect(
        self, line: MessageConnection, findings: dict[int, _Finding]
    ) -> tuple[Formed | None, int | None]:
        begin, target = time.monotonic(), self._target
        while self._target == target:
            with self._changed:
                self._changed.wait(_TICK)
                found = dict(findings)
            chief = self._other_chief(found)
            if chief is not None:
                return None, chief if chief >= 0 else None
            hub = self._commit(found, time.monotonic() - begin)
            if hub is not None:
                return Formed(line, hub, self._own_welcome(line)), None
        return None, None

    def _own_welcome(self, line: MessageConnection) -> dict[str, Any]:
        while True:
            received = line.receive()
            if received is not None and received[0]["kind"] == "welcome":
                return received[0]

    def _others(self) -> list[int]:
        return [index for index in self._order() if index != self.index]

    def _probe_often(
        self, index: int, findings: dict[int, _Finding], ended: threading.Event
    ) -> None:
        while not ended.is_set() and not self._closed.is_set():
            found = self._probe(index)
            if found is not None:
                with self._changed:
                    findings[index] = found
                    self._changed.notify_all()
            ended.wait(BEAT)

    def _probe(self, index: int) -> _Finding | None:
        """The state of a worker; None if it is not clear."""
        try:
            line = self._dial(index)
        except OSError as error:
            is_refused = error.errno in _REFUSED
            return _Finding(_DEAD if is_refused else _UNREACHABLE)
        line.send(self._hello("probe"))
        try:
            received = line.receive(self._answer_time(index))
        except EOFError:
            return None
        finally:
            line.abort()
        if received is None:
            return _Finding(_STOPPED)
        return _Finding(_ALIVE, received[0])

    def _other_chief(self, findings: dict[int, _Finding]) -> int | None:
        """A worker to follow: its index, or -1 for the first that is alive."""
        order = self._order()
        own = order.index(self.index)
        for index, found in findings.items():
            answer = found.answer
            if answer.get("kind") != "alive":
                continue
            if answer["phase"] in (_RUNNING, _JOINING):
                is_newer = answer["generation"] >= self._target
                if is_newer and answer["phase"] == _RUNNING:
                    self._join_as_new()
                chief = answer["chief"]
                # This process may have replaced the chief that was lost.
                is_other = chief not in (None, self.index)
                if is_other and (is_newer or self._target == 0):
                    return int(chief)
            elif self._target == 0 < answer["target"]:
                return index
            elif answer["phase"] == _FORMING and order.index(index) < own:
                return -1
        return None

    def _commit(self, findings: dict[int, _Finding], waited: float) -> Hub | None:
        """Forms the generation, if it is clear which workers are alive.

        Raises:
            WorkerError: if there are too few for too long.
        """
        is_late = waited > self._limits.patience
        with self._changed:
            candidates = list(self._candidates.values())
            previous = dict(self._previous)
        if self.uid not in {each.uid for each in candidates}:
            return None
        for each in candidates:
            refusal = self._difference(each)
            if refusal is not None:
                if not previous:
                    self._refuse_all(refusal["why"], is_late=False)
                self._refuse(each, refusal["why"], is_late=False)
                return None
        voters, newcomers = self._sorted(candidates, previous)
        missing = [i for i in self._others() if i not in {v.index for v in voters}]
        limit = self._limits.max_workers or len(self._addresses)
        if previous:
            lost = [i for i in missing if self._is_lost(findings.get(i), previous[i])]
            is_clear = lost == missing
        else:
            is_clear = not missing or len(voters) >= limit
        if not is_clear and not is_late:
            return None
        # This worker is the first, since the hub is in its process.
        voters.sort(key=lambda voter: voter.uid != self.uid)
        chosen = (voters + newcomers)[: max(limit, len(voters) if previous else 0)]
        cut = [i for i in missing if _state_of(findings, i) == _UNREACHABLE]
        is_quorum = not previous or _is_quorum([v.index for v in voters], cut)
        if len(chosen) >= self._limits.min_workers and is_quorum:
            return self._welcome(chosen, previous)
        if is_late:
            self._refuse_all(
                self._too_few(chosen, missing, cut, is_quorum), is_late=True
            )
        return None

    def _is_lost(self, found: _Finding | None, uid: str) -> bool:
        if found is None:
            return False
        if found.state == _ALIVE:
            # Another process has taken its place.
            return bool(found.answer.get("uid") != uid)
        return True

    def _sorted(
        self, candidates: list[_Candidate], previous: dict[int, str]
    ) -> tuple[list[_Candidate], list[_Candidate]]:
        """Workers of the previous generation in its order, and new ones."""
        first: dict[int, _Candidate] = {}
        for each in sorted(candidates, key=lambda each: each.since):
            other = first.setdefault(each.index, each)
            if other is each:
                continue
            if not previous:
                self._refuse_all(_duplicate(each.index), is_late=False)
            is_voter = previous.get(each.index) == each.uid
            if is_voter:
                first[each.index] = each
            extra = other if is_voter else each
            self._refuse(extra, _duplicate(each.index), is_late=False)
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
        with self._changed:
            candidates = list(self._candidates.values())
        for each in candidates:
            self._refuse(each, why, is_late=is_late)
        raise (WorkerError if is_late else ClusterError)(why)

    def _too_few(
        self,
        chosen: list[_Candidate],
        missing: list[int],
        cut: list[int],
        is_quorum: bool,
    ) -> str:
        named = " and ".join(f"worker {i} ({self._addresses[i]})" for i in missing)
        text = (
            f"{len(chosen)} of {len(self._addresses)} workers are connected after "
            f"{self._limits.patience:g} s, without {named or 'new ones'}. "
        )
        if not is_quorum:
            return text + (
                f"{len(cut)} cannot be reached and may continue without this one; a "
                "group continues only with the larger part of its workers."
            )
        return text + (
            f"At least {self._limits.min_workers} are needed "
            "(`ks.Elastic(min_workers=...)`)."
        )

    def _welcome(
        self, chosen: list[_Candidate], previous: dict[int, str]
    ) -> Hub | None:
        """The hub of the chosen workers; None if one has just ended."""
        infos = []
        for each in chosen:
            is_old = not previous or previous.get(each.index) == each.uid
            step = each.step if is_old else None
            infos.append(
                {**each.info, "index": each.index, "uid": each.uid, "step": step}
            )
        hub = Hub.over([each.line for each in chosen], infos, self._limits.timeout)
        facts = {"generation": self._target, "previous": list(previous.items())}
        with self._changed:
            if not all(each.uid in self._candidates for each in chosen):
                return None
            # First of all messages.
            hub.welcome(facts)
            for rank, each in enumerate(chosen):
                del self._candidates[each.uid]
                each.rank, each.hub = rank, hub
        return hub


def _state_of(findings: dict[int, _Finding], index: int) -> str:
    found = findings.get(index)
    return found.state if found is not None else _UNREACHABLE


def _is_quorum(present: list[int], cut: list[int]) -> bool:
    """Whether a group may continue, if the workers that are cut off may, too.

    >>> _is_quorum([0, 1], [2]), _is_quorum([2], [0, 1])
    (True, False)
    >>> _is_quorum([0], [1]), _is_quorum([1], [0])
    (True, False)
    """
    if len(present) != len(cut):
        return len(present) > len(cut)
    return min(present) < min(cut)


def _duplicate(index: int) -> str:
    return (
        f"Two processes connected as worker {index}. Give each its own index "
        "(`task.index` in TF_CONFIG)."
    )
