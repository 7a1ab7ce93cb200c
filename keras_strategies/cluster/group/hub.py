"""Hub in the chief's process: rendezvous and heartbeats of workers."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import socket
import threading
import time
from collections.abc import Callable, Collection, Hashable
from typing import Any

from keras_strategies.cluster.group.chief_saves import ChiefSaves, SavedFile, SaveWait
from keras_strategies.cluster.group.group_messages import (
    BEAT,
    EXITED,
    NO_ARRIVAL,
    NO_HEARTBEAT,
    Message,
    MessageConnection,
    Silence,
    accepted,
    encoded,
    first_message,
)
from keras_strategies.cluster.group.stalls import STALL_SECONDS, StallWatch
from keras_strategies.cluster.startup_report import Progress

_logger = logging.getLogger("keras_strategies.cluster")

# Number of workers whose times are in one heartbeat.
_TIMES_OF_BEAT = 16


@dataclasses.dataclass
class _Member:
    """A connected worker."""

    connection: MessageConnection
    info: dict[str, Any]
    silence: Silence = dataclasses.field(default_factory=Silence)
    progress: str = ""
    times: tuple[float, ...] = ()
    failure: str = ""
    has_left: bool = False


class Hub:
    """Connects workers and reports the first lost one.

    Args:
        server: the socket that workers connect to; None for a hub of workers that are
            connected already (see `over`).
        job: str, identifies this cluster among others at the same address.
        addresses: the workers' addresses, for messages.
        timeout: float, seconds for workers to connect, and between heartbeats.
        absence: callable, says why a worker cannot come; None while all may.
    """

    def __init__(
        self,
        server: socket.socket | None,
        job: str,
        addresses: list[str],
        timeout: float,
        absence: Callable[[], str | None] = lambda: None,
    ):
        self._server = server
        self._job = job
        self._addresses = addresses
        self._timeout = timeout
        self._absence = absence
        self._lock = threading.Lock()
        self._members: dict[int, _Member] = {}
        self._refusal: dict[str, Any] | None = None
        self._gathered: dict[tuple[str, int], dict[int, tuple[str, bytes]]] = {}
        # While workers agree on a step to stop after: the steps begun by each.
        self._stops: dict[int, int] | None = None
        self._saves = ChiefSaves()
        self._lost = False
        # How many members' times have been sent in turn.
        self._times_sent = 0
        # Whether one of the members has left.
        self._has_left = False
        self._closed = threading.Event()
        self._progress = Progress()
        self._stalls = StallWatch(
            min(STALL_SECONDS, timeout / 2), self._ask, lambda i: self._about(i, "")
        )
        if server is not None:
            self._progress.report(
                f"waiting for {len(addresses)} workers at {addresses[0]}"
            )
            self._start(self._accept, server)
            self._start(self._watch)

    @classmethod
    def over(
        cls,
        connections: list[MessageConnection],
        infos: list[dict[str, Any]],
        timeout: float,
    ) -> Hub:
        """A hub of connected workers, by index; call `serve` for each, then `welcome`.

        Args:
            connections: the workers' connections.
            infos: the information of each worker.
            timeout: float, seconds without a heartbeat until a worker is lost.
        """
        hub = cls(None, "", [str(info["host"]) for info in infos], timeout)
        for index, (connection, info) in enumerate(
            zip(connections, infos, strict=True)
        ):
            hub._members[index] = _Member(connection, info)
        return hub

    def welcome(self, facts: dict[str, Any]) -> None:
        """Starts the group of connected workers.

        Args:
            facts: dict, sent to all workers beside the members' information.
        """
        infos = [self._members[i].info for i in range(len(self._addresses))]
        with self._lock:
            self._send_to_all({"kind": "welcome", "members": infos, **facts})
        self._start(self._watch)

    def _start(self, target: Any, *args: Any) -> None:
        threading.Thread(
            target=target, args=args, name="group-hub", daemon=True
        ).start()

    def close(self, *, abort: bool = False) -> None:
        """Closes all connections: after the pending messages, or at once."""
        self._closed.set()
        if self._server is not None:
            with contextlib.suppress(OSError):
                self._server.shutdown(socket.SHUT_RDWR)
            self._server.close()
        with self._lock:
            members = list(self._members.values())
        for member in members:
            (member.connection.abort if abort else member.connection.close)()

    @property
    def is_complete(self) -> bool:
        return len(self._members) == len(self._addresses)

    # Rendezvous.

    def _accept(self, server: socket.socket) -> None:
        for connected in accepted(server):
            self._start(self._connected, connected)

    def _connected(self, connected: socket.socket) -> None:
        first = first_message(connected, self._timeout)
        if first is None:
            return
        connection, hello = first
        if hello.get("kind") != "hello":
            connection.close()
            return
        if hello.get("job") != self._job:
            connection.send({"kind": "wrong_job"})
            connection.close()
            return
        index = self._join(connection, hello)
        if index is None:
            connection.close()
            return
        self.serve(index, connection)

    def serve(
        self, index: int, connection: MessageConnection, received: Message | None = None
    ) -> None:
        """Handles a worker's messages, after `received`, until its connection ends."""
        try:
            while True:
                if received is not None:
                    self._handle(index, *received)
                received = connection.receive()
        except EOFError:
            self._connection_ended(index)
            connection.close()

    def _join(self, connection: MessageConnection, hello: dict[str, Any]) -> int | None:
        index, info = int(hello["index"]), dict(hello["info"])
        info["host"] = connection.other_host
        with self._lock:
            why = self._join_problem(index, info)
            if self._refusal is None and why is not None:
                self._refuse(why, is_late=False)
            if self._refusal is not None:
                connection.send(self._refusal)
                return None
            self._members[index] = _Member(connection, info)
            self._progress.report(
                f"worker {index} is ready at {self._addresses[index]}, "
                f"{len(self._members)} of {len(self._addresses)}"
            )
            if self.is_complete:
                infos = [self._members[i].info for i in range(len(self._addresses))]
                self._send_to_all({"kind": "welcome", "members": infos})
            return index

    def _join_problem(self, index: int, info: dict[str, Any]) -> str | None:
        """The reason to refuse a worker; None to accept it."""
        if index in self._members:
            first = self._members[index].info
            return (
                f"Two processes connected as worker {index}: process {first['pid']} "
                f"on {first['host']}, and process {info['pid']} on {info['host']}. "
                "Give each its own index (`task.index` in TF_CONFIG)."
            )
        for other, member in self._members.items():
            for key, value in member.info["same"].items():
                own = info["same"].get(key)
                if own != value:
                    return (
                        f"Workers disagree on {key}: worker {other} has {value!r}, "
                        f"worker {index} has {own!r}. Run the same script with the "
                        "same versions on all workers."
                    )
        return None

    def _refuse(self, why: str, is_late: bool) -> None:
        """Refuses all workers. The lock is held."""
        if self._refusal is None:
            self._refusal = {"kind": "refused", "why": why, "is_late": is_late}
            self._send_to_all(self._refusal)

    def _send_to_all(self, header: dict[str, Any], payload: bytes = b"") -> None:
        message = encoded(header, payload)
        for member in self._members.values():
            member.connection.send_encoded(message)

    # Heartbeats and losses.

    def _watch(self) -> None:
        deadline = time.monotonic() + self._timeout
        while not self._closed.wait(BEAT):
            now, stall = time.monotonic(), None
            with self._lock:
                chief = self._members.get(0)
                progress = chief.progress if chief is not None else ""
                beat = {"kind": "beat", "progress": progress, **self._next_times()}
                self._send_to_all(beat)
                if not self.is_complete:
                    if (why := self._absence()) is not None:
                        self._refuse(why, is_late=True)
                    elif now > deadline:
                        self._refuse(self._missing_workers(), is_late=True)
                    continue
                for index, member in self._members.items():
                    silent = member.silence.count()
                    if silent > self._timeout and not member.has_left:
                        self._mark_lost(index, f"{NO_HEARTBEAT} for {silent:.0f} s")
                stall = self._stall(now)
            if stall is not None:
                # Not with the lock: a full pipe delays it.
                _logger.warning("%s", stall)

    def _stall(self, now: float) -> str | None:
        """A report about workers that others wait for, if one is due; to all workers.

        The lock is held.
        """
        if self._lost or self._has_left:
            return None
        collectives: dict[Hashable, tuple[str, Collection[int]]] = {
            key: (next(iter(values.values()))[0], values)
            for key, values in self._gathered.items()
            # Other threads may be ahead of the steps.
            if not key[0]
        }
        text = self._stalls.tick(collectives, now)
        overdue = self._stalls.overdue(self._timeout, now)
        if overdue is not None and self._server is not None:
            # Elastic workers have more patience with one that is busy.
            index, where = overdue
            self._mark_lost(index, f"{NO_ARRIVAL} for {self._timeout:g} s. {where}")
        if text is not None:
            self._send_to_all({"kind": "stall", "text": text})
        return text

    def _ask(self, index: int) -> None:
        self._members[index].connection.send({"kind": "where"})

    def _next_times(self) -> dict[str, Any]:
        """Times of the next members in turn, so that beats do not grow with them."""
        first = self._times_sent if self._times_sent < len(self._members) else 0
        self._times_sent = first + _TIMES_OF_BEAT
        indices = sorted(self._members)[first : self._times_sent]
        return {"times": {i: self._members[i].times for i in indices}}

    def _missing_workers(self) -> str:
        missing = [i for i in range(len(self._addresses)) if i not in self._members]
        named = " and ".join(f"worker {i} ({self._addresses[i]})" for i in missing)
        return (
            f"Of {len(self._addresses)} workers, {named} did not connect within "
            f"{self._timeout:g} s. Check that it was started with the same cluster "
            f"and can reach the chief at {self._addresses[0]}. "
            "`CommunicationOptions(timeout_seconds=...)` sets this timeout."
        )

    def _connection_ended(self, index: int) -> None:
        """Handles the end of a connection."""
        with self._lock:
            if not self.is_complete:
                # It may reconnect: a launcher restarts failed processes.
                if index in self._members and self._refusal is None:
                    del self._members[index]
                return
            if not self._members[index].has_left:
                self._mark_lost(index, "its process or its connection ended")

    def _mark_lost(self, index: int, how: str) -> None:
        """Reports the first loss to all workers; later losses may follow from it."""
        if self._lost:
            return
        self._lost = True
        # Its own failure report has more details than the lost connection.
        how = self._members[index].failure or how
        self._send_to_all({"kind": "lost", **self._about(index, how)})

    def _about(self, index: int, how: str) -> dict[str, Any]:
        """The values of a `LostWorker`."""
        member = self._members[index]
        info = {name: member.info[name] for name in ("host", "pid")}
        return {"index": index, "how": how, "progress": member.progress, **info}

    # Messages.

    def _handle(self, index: int, header: dict[str, Any], payload: bytes) -> None:
        kind = header.get("kind")
        with self._lock:
            member = self._members[index]
            member.silence.reset()
            if kind == "beat":
                member.times = tuple(header["times"])
                # The progress of a failed worker is reported.
                if not member.failure:
                    member.progress = header["progress"]
                numbers, waits = header["position"]
                self._stalls.beat(index, numbers, waits, time.monotonic())
            elif kind == "where":
                member.progress = header["progress"]
                self._stalls.answered(index, header["where"])
            elif kind == "gather":
                member.failure = ""
                member.progress = header["progress"]
                key = (header["stream"], header["number"])
                self._gather(index, key, header["what"], payload)
            elif kind == "saved":
                file = SavedFile(header["name"], header["error"])
                self._saves.save(header["position"], file)
                self._answer_saves()
            elif kind == "await_save":
                names = ("position", "name", "same", "calls", "any_name")
                self._saves.wait(SaveWait(index, *(header[name] for name in names)))
                self._answer_saves()
            elif kind == "failed":
                member.progress = header["progress"]
                member.failure = header["how"]
                about = self._about(index, member.failure)
                for other, each in self._members.items():
                    if other != index:
                        each.connection.send(
                            {"kind": "failed", "call": header["call"], **about}
                        )
            elif kind == "stop":
                if self._stops is None:
                    self._stops = {}
                    self._send_to_all({"kind": "stop"})
            elif kind == "begun":
                assert self._stops is not None
                self._stops[index] = int(header["count"])
                if len(self._stops) == len(self._addresses):
                    last = max(self._stops.values())
                    self._stops = None
                    self._send_to_all({"kind": "stop_after", "count": last})
            elif kind == "bye":
                member.has_left = self._has_left = True
                self._check_gathers()
                how = member.failure or EXITED
                self._send_to_all({"kind": "left", **self._about(index, how)})
                if index == 0:
                    self._saves.leave()
                    self._answer_saves()

    def _gather(
        self, index: int, key: tuple[str, int], what: str, payload: bytes
    ) -> None:
        stream, number = key
        if index == 0 and not stream:
            self._saves.begin(number)
            self._answer_saves()
        values = self._gathered.setdefault(key, {})
        values[index] = (what, payload)
        if len(values) == len(self._addresses):
            del self._gathered[key]
            # Most values are equal, so an answer does not grow with the workers.
            runs = [
                (*value, len(list(equal)))
                for value, equal in itertools.groupby(
                    values[i] for i in range(len(values))
                )
            ]
            header = {
                "kind": "gathered",
                "key": key,
                "runs": [[what, len(part), count] for what, part, count in runs],
                # The hub ends with the chief, so this is reported first.
                "progress": self._members[0].progress,
            }
            self._send_to_all(header, b"".join(part for _, part, _ in runs))
        elif self._has_left:
            self._check_gathers()

    def _answer_saves(self) -> None:
        """Ends the waits for files that the chief has saved, or will not save."""
        for wait, problem in self._saves.take_answers():
            self._members[wait.index].connection.send(
                {
                    "kind": "chief_saved",
                    "position": wait.position,
                    "calls": wait.calls,
                    "problem": problem,
                }
            )

    def _check_gathers(self) -> None:
        """Fails collectives that wait for a worker that has left."""
        for values in self._gathered.values():
            for index, member in self._members.items():
                if member.has_left and index not in values:
                    what = next(iter(values.values()))[0]
                    self._mark_lost(index, f"{EXITED} while others wait in {what!r}")
                    return
