"""Listener of elastic workers: votes, probes, and workers that wait to join."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from keras_strategies.cluster.group.group_messages import (
    BEAT,
    MessageConnection,
    accepted,
    first_message,
    server_at,
)
from keras_strategies.cluster.group.group_settings import GroupSettings
from keras_strategies.cluster.group.hub import Hub
from keras_strategies.cluster.own_address import own_address
from keras_strategies.cluster.spec import split_address
from keras_strategies.errors import ClusterError

STARTING, FORMING, JOINING, RUNNING = "starting", "forming", "joining", "running"


@dataclass
class Candidate:
    """A worker that waits for the next generation.

    Args:
        connection: the connection to it.
        index: int, its number in the cluster.
        uid: str, its process.
        step: int, the last step that it has finished; None without training state.
        info: dict, its information for the others.
        is_ready: bool, whether it can become a member of a group that trains.
        admits: bool, whether new workers can begin after its step.
    """

    connection: MessageConnection
    index: int
    uid: str
    step: int | None
    info: dict[str, Any]
    is_ready: bool = True
    admits: bool = True
    since: float = field(default_factory=time.monotonic)
    hub: Hub | None = None
    rank: int = -1


class RendezvousListener:
    """Listener of one worker: votes, probes, and workers that wait to join.

    Attributes are read and assigned while `changed` is held.

    Args:
        settings: `GroupSettings`.
        on_end: called on a thread, with the number of a generation, when the other
            workers end it.
        on_newcomer: called on a thread of the chief when a worker waits to join.

    Raises:
        ValueError: if this worker cannot listen at its address.
    """

    def __init__(
        self,
        settings: GroupSettings,
        on_end: Callable[[int], None],
        on_newcomer: Callable[[], None],
    ):
        # Addresses of the latest processes: workers may be replaced on other machines.
        self.addresses = list(settings.addresses)
        self.index = settings.index
        self.limits = settings.limits
        self.job = settings.job_id
        self.uid = f"{os.getpid()}-{secrets.token_hex(8)}"
        same = json.loads(json.dumps(settings.same))
        own = self.addresses[self.index]
        self.info = {"same": same, "pid": os.getpid(), "address": own}
        self._on_end = on_end
        self._on_newcomer = on_newcomer
        self.changed = threading.Condition()
        self.phase = STARTING
        self.generation = -1
        # The generation to form, and the workers of the previous one, in the order of
        # ranks: index and uid.
        self.target = 0
        self.previous: dict[int, str] = {}
        self.leads = False
        # The worker to which others are redirected.
        self.chief: int | None = None
        self.candidates: dict[str, Candidate] = {}
        self._was_stopped = False
        self._counted = time.monotonic()
        self.closed = threading.Event()
        self._server = self._listen()
        self.start(self._accept)
        self.start(self._send_heartbeats)

    def start(self, target: Callable[..., None], *args: Any) -> None:
        """Starts a thread."""
        threading.Thread(
            target=target, args=args, name="group-rendezvous", daemon=True
        ).start()

    def _listen(self) -> socket.socket:
        host, port = split_address(self.addresses[self.index])
        try:
            return server_at(own_address(host), port)
        except OSError as error:
            raise ClusterError(
                f"Worker {self.index} cannot listen at {host}:{port}: "
                f"{error.strerror or error}. Elastic workers listen at their own "
                "address of the cluster; check that it is an address of this machine "
                "and that no other program uses the port."
            ) from error

    def was_stopped(self) -> bool:
        """Whether this process was stopped in its current generation.

        The others may have formed several generations without it. Called every `BEAT`
        seconds, with the lock held.
        """
        now = time.monotonic()
        self._was_stopped |= now - self._counted > self.limits.timeout
        self._counted = now
        return self._was_stopped

    @property
    def host(self) -> str:
        """str, the address that it listens at."""
        return str(self._server.getsockname()[0])

    def close(self) -> None:
        """Ends the listener; waiting workers see the end of their connection."""
        self.closed.set()
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self.drop_candidates()

    # Messages of other workers.

    def _accept(self) -> None:
        for connected in accepted(self._server):
            self.start(self._connected, connected)

    def _connected(self, connected: socket.socket) -> None:
        first = first_message(connected, self.limits.timeout)
        if first is None:
            return
        connection, header = first
        if header.get("job") != self.job:
            connection.send({"kind": "wrong_job"})
        elif header.get("kind") == "probe":
            self._note(header)
            connection.send(self.state("alive"))
        elif header.get("kind") == "vote":
            self._note(header)
            self._vote(connection, header)
            return
        connection.close()

    def state(self, kind: str) -> dict[str, Any]:
        """A message of a kind with the state of this worker."""
        with self.changed:
            return {
                "kind": kind,
                "uid": self.uid,
                "phase": self.phase,
                "generation": self.generation,
                "target": self.target,
                "leads": self.leads,
                "chief": self.index if self.leads else self.chief,
            }

    def _note(self, header: dict[str, Any]) -> None:
        """Ends this worker's generation if a peer forms a later one."""
        previous = {int(index): uid for index, uid in header["previous"]}
        with self.changed:
            is_of_mine = previous.get(self.index) == self.uid
            is_newer = header["target"] > self.target
            generation = self.generation
            ends = self.phase == RUNNING and header["target"] > generation
            if is_of_mine and self.phase == FORMING and is_newer:
                self.target, self.previous = header["target"], previous
                self.changed.notify_all()
        if is_of_mine and ends:
            self._on_end(generation)

    def _vote(self, connection: MessageConnection, header: dict[str, Any]) -> None:
        info = {**header["info"], "host": connection.other_host}
        candidate = Candidate(
            connection,
            int(header["index"]),
            header["uid"],
            header["step"],
            info,
            header["is_ready"],
            header["admits"],
        )
        with self.changed:
            is_behind = header["target"] > 0 and not self.target and not self.previous
            answer = self.state("new") if is_behind else self._answer(candidate)
            if answer is None:
                self.candidates[candidate.uid] = candidate
                self.changed.notify_all()
            is_new = self.phase == RUNNING and candidate.uid not in self._uids()
        if answer is not None:
            connection.send(answer)
            connection.close()
            return
        if is_new:
            self._on_newcomer()
        received = None
        try:
            while candidate.hub is None:
                received = connection.receive(BEAT)
                if received is not None:
                    # It follows the welcome: the welcome's sender holds the lock until
                    # the candidate has its hub.
                    with self.changed:
                        pass
        except EOFError:
            self._forget(candidate)
        if candidate.hub is not None:
            candidate.hub.serve(candidate.rank, connection, received)
        connection.close()

    def _uids(self) -> set[str]:
        return set(self.previous.values())

    def _answer(self, candidate: Candidate) -> dict[str, Any] | None:
        """Answer to a vote; None for a candidate that waits. The lock is held."""
        if self.phase in (STARTING, FORMING) or candidate.uid in self._uids():
            return None
        if self.phase == JOINING or self.chief != self.index or not candidate.is_ready:
            return self.state("moved")
        why = self.refusal(candidate)
        return why and {"kind": "refused", **why}

    def refusal(self, candidate: Candidate) -> dict[str, Any] | None:
        """The reason to refuse a new worker; None to accept it."""
        if not self.limits.rejoin:
            why = (
                f"Worker {candidate.index} cannot join: the others train with "
                "`Elastic(rejoin=False)`. Restart all workers, or set `rejoin=True`."
            )
            return {"why": why, "is_late": True}
        return self.difference(candidate)

    def difference(self, candidate: Candidate) -> dict[str, Any] | None:
        """The reason to refuse a worker with other versions or settings."""
        for key, value in self.info["same"].items():
            found = candidate.info["same"].get(key)
            if found != value:
                why = (
                    f"Workers disagree on {key}: worker {self.index} has {value!r}, "
                    f"worker {candidate.index} has {found!r}. Run the same script "
                    "with the same versions on all workers."
                )
                return {"why": why, "is_late": False}
        return None

    def _send_heartbeats(self) -> None:
        while not self.closed.wait(BEAT):
            # With the lock, so that none follows the welcome.
            with self.changed:
                self.was_stopped()
                waiting = list(self.candidates.values())
                members = self.previous if self.phase == RUNNING else {}
                state = self.state("wait")
                for candidate in waiting:
                    candidate.connection.send(state)
            for candidate in waiting:
                waited = time.monotonic() - candidate.since
                # A member itself waits as well, until this worker notices its loss.
                is_second = members.get(candidate.index, candidate.uid) != candidate.uid
                if is_second and waited > 2 * self.limits.timeout:
                    self.refuse(candidate, duplicate(candidate.index), is_late=False)

    def _forget(self, candidate: Candidate) -> None:
        with self.changed:
            # The worker may wait again, with another connection.
            if self.candidates.get(candidate.uid) is candidate:
                del self.candidates[candidate.uid]
            self.changed.notify_all()

    def refuse(self, candidate: Candidate, why: str, *, is_late: bool) -> None:
        """Ends the wait of a worker with an error."""
        self._forget(candidate)
        candidate.connection.send({"kind": "refused", "why": why, "is_late": is_late})
        candidate.connection.close()

    def drop_candidates(self) -> None:
        """Makes waiting workers vote again."""
        with self.changed:
            waiting = list(self.candidates.values())
            self.candidates.clear()
        for candidate in waiting:
            candidate.connection.close()

    @property
    def joining(self) -> int:
        """The number of workers that wait at the chief and may become members."""
        with self.changed:
            members = self.previous if self.phase == RUNNING else {}
            ready = [each for each in self.candidates.values() if each.is_ready]
            waiting = {each.index for each in ready}
            limit = self.limits.max_workers or len(self.addresses)
            return min(len(waiting - set(members)), limit - len(members))

    def forget(self) -> None:
        """Discards all generations, as before the first one."""
        with self.changed:
            self.phase, self.generation, self.target = STARTING, -1, 0
            self.previous, self.chief, self.leads = {}, None, False
        self.drop_candidates()

    def run(self, facts: dict[str, Any]) -> None:
        """Begins a generation, from the message of its leader."""
        with self.changed:
            self.phase = RUNNING
            self.generation = facts["generation"]
            members = facts["members"]
            for each in members:
                self.addresses[each["index"]] = each["address"]
            self.previous = {each["index"]: each["uid"] for each in members}
            self.chief = members[0]["index"]
            self.leads = self._was_stopped = False
            is_chief = self.chief == self.index
        if not is_chief:
            self.drop_candidates()
        elif self.joining > 0:
            self._on_newcomer()


def duplicate(index: int) -> str:
    """The reason to refuse a second process with an index."""
    return (
        f"Two processes connected as worker {index}. Give each its own index "
        "(`task.index` in TF_CONFIG)."
    )
