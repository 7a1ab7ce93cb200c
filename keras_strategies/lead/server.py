"""The lead: a process that decides about a group of workers, and trains nothing.

One thread, one connection for each worker. The decisions are those of `decisions.py`;
here are connections, time and messages.
"""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import os
import secrets
import socket
import ssl
import time
from collections.abc import Collection, Hashable
from typing import Any

from keras_strategies.lead.decisions import EVENTS, step
from keras_strategies.lead.events import JOINT, TICK, Beat, Gone, Hello, Overdue, Tick
from keras_strategies.lead.peers import (
    PENDING,
    PROOF_SECONDS,
    SHORT_SECONDS,
    LeadPeer,
    RareWarnings,
)
from keras_strategies.lead.stalls import STALL_SECONDS, StallWatch
from keras_strategies.lead.state import (
    EXITED,
    NO_ARRIVAL,
    LeadState,
    Settings,
    ranks_of,
    replace,
)
from keras_strategies.lead.wire import Session, WireError, encoded

# Errors of `accept` that pass when descriptors or memory are free again.
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
# Beats that the lead answers in a second, of all workers together.
_BEATS = 100
# Workers with times in the answer to a beat of the chief.
_TIMES = 16
# Seconds without a worker after which a lead ends whose group has not formed.
_LEFT = 1.0
_NAMES = ("index", "pid", "same", "generation", "step")


class LeadServer:
    """The lead at one address.

    Args:
        listener: the listening socket.
        settings: `Settings`, some of which the first worker may change.
        secret: bytes that the workers know.
        job: str, identifies the cluster among others at the same address.
        starter: int, the process that has started this one; 0 for any.
        tls: a context with which connections are encrypted; None without.
    """

    def __init__(
        self,
        listener: socket.socket,
        settings: Settings,
        secret: bytes,
        job: str = "",
        starter: int = 0,
        tls: ssl.SSLContext | None = None,
    ):
        self._listener = listener
        self._settings = settings
        self.secret = secret
        self._job = job
        self._starter = starter
        self._tls = tls
        self.state = LeadState(settings)
        self.warnings = RareWarnings(self._warn)
        #: Names this lead: a worker of an earlier one has no place here.
        self.run_id = secrets.token_hex(8)
        self._peers: dict[str, LeadPeer] = {}
        self._sessions: dict[str, Session] = {}
        # Lost connections that may be continued, with what ends that time.
        self._lost: dict[str, asyncio.TimerHandle] = {}
        self._pending: dict[LeadPeer, None] = {}
        self._heard: dict[str, Beat] = {}
        # Equal messages that have come together, with the workers that have sent them.
        self._joint: dict[tuple[str, Any], list[str]] = {}
        self._accepting: set[asyncio.Task[Any]] = set()
        self._next_times = 0
        self._last_peer = 0.0
        self._stalls_of, self._stalls = 0, self._new_stalls()
        self._over = asyncio.Event()

    @property
    def beat_seconds(self) -> float:
        """float, seconds between the beats of a worker."""
        settings = self._settings
        return max(TICK, min(settings.workers / _BEATS, settings.timeout / 4))

    async def serve(self) -> None:
        """Serves until training has ended and all workers have left."""
        self._loop = asyncio.get_running_loop()
        self._listener.setblocking(False)
        self._resume()
        ticks = self._loop.create_task(self._tick())
        await self._over.wait()
        ticks.cancel()
        self._pause()
        self._listener.close()
        for peer in [*self._peers.values(), *self._pending]:
            peer.close()

    async def _tick(self) -> None:
        ended = None
        while True:
            await asyncio.sleep(TICK)
            now = time.monotonic()
            self._drop_pending(PROOF_SECONDS)
            heard, self._heard = self._heard, {}
            self._decide(Tick(now, heard))
            self._watch_stalls(now)
            if self.state.is_over:
                ended = ended or now
            if self._is_done(now, ended):
                self._over.set()

    def _watch_stalls(self, now: float) -> None:
        """Asks workers that others wait for where they are, and reports them."""
        group = self.state.group
        if group.number != self._stalls_of:
            self._stalls_of, self._stalls = group.number, self._new_stalls()
        if not group.is_active or self.state.left:
            return
        collectives: dict[Hashable, tuple[str, Collection[int]]] = {
            key: (each.what, ranks_of(each.arrived))
            for key, each in self.state.comparisons.items()
            # Other threads may be ahead of the steps.
            if not key[0]
        }
        text = self._stalls.tick(collectives, now)
        if text is not None:
            self._send(tuple(group.ranks), "stalled", {"text": text})
        overdue = self._stalls.overdue(self._settings.timeout, now)
        if overdue is not None and self._settings.is_fixed:
            # Elastic workers have more patience with one that is busy.
            rank, where = overdue
            how = f"{NO_ARRIVAL} for {self._settings.timeout:g} s. {where}"
            self._decide(Overdue(list(group.ranks)[rank], how))

    def _new_stalls(self) -> StallWatch:
        members = list(self.state.group.ranks)
        return StallWatch(
            min(STALL_SECONDS, self._settings.timeout / 2),
            lambda rank: self._send((members[rank],), "where", {}),
            lambda rank: self.state.workers[members[rank]],
        )

    def _is_done(self, now: float, ended: float | None) -> bool:
        if self._peers or self._lost:
            self._last_peer = now
        if ended is None:
            # Started by a worker, which has failed before the others came.
            is_left = self._starter and not self.state.has_run and not self._peers
            was_reached = self._last_peer > 0.0
            is_orphan = self._starter != os.getppid()
            since = now - self._last_peer
            return bool(is_left and (is_orphan or (was_reached and since > _LEFT)))
        return not self._peers or now > ended + self._settings.timeout

    def _warn(self, text: str) -> None:
        """Shows a line at the chief."""
        chief = next(iter(self.state.group.ranks), next(iter(self._peers), ""))
        if (peer := self._peers.get(chief)) is not None:
            peer.send(encoded("log", {"text": text}))

    # Connections

    def _resume(self) -> None:
        if not self._over.is_set():
            self._loop.add_reader(self._listener, self._accept)

    def _pause(self, seconds: float | None = None) -> None:
        """Accepts no connections, for some seconds."""
        self._loop.remove_reader(self._listener)
        if seconds is not None:
            self._loop.call_later(seconds, self._resume)

    def _accept(self) -> None:
        if len(self._pending) + len(self._accepting) >= PENDING:
            self._drop_pending(SHORT_SECONDS)
            self._pause(0.01)
            return
        try:
            connected, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            if error.errno not in _EXHAUSTED:
                raise
            self.warnings.warn(f"accepting pauses: {error.strerror}")
            self._pause(0.5)
            return
        connected.setblocking(False)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        task = self._loop.create_task(self._connect(connected))
        self._accepting.add(task)
        task.add_done_callback(self._accepting.discard)

    def _detect_cut_cables(self, connected: socket.socket) -> None:
        """Ends a connection without an answer of the other machine.

        That of a process that is stopped answers for it.
        """
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        seconds = max(1, round(self._settings.timeout))
        values = {
            "TCP_KEEPIDLE": seconds,
            "TCP_KEEPINTVL": max(1, seconds // 3),
            "TCP_KEEPCNT": 3,
            # For data that is under way, in milliseconds.
            "TCP_USER_TIMEOUT": 2000 * seconds,
        }
        for name, value in values.items():
            # Of Linux; other systems have some of them.
            if (option := getattr(socket, name, None)) is not None:
                connected.setsockopt(socket.IPPROTO_TCP, option, value)

    async def _connect(self, connected: socket.socket) -> None:
        peer = LeadPeer(self)
        limit = None if self._tls is None else PROOF_SECONDS
        try:
            await self._loop.connect_accepted_socket(
                lambda: peer, connected, ssl=self._tls, ssl_handshake_timeout=limit
            )
        except OSError as error:
            self.warnings.warn(f"a connection has failed: {error}")
            connected.close()
            return
        if not peer.is_proved:
            self._pending[peer] = None

    def _drop_pending(self, seconds: float) -> None:
        """Closes connections that have had some seconds without a proof."""
        limit = time.monotonic() - seconds
        for peer in [each for each in self._pending if each.since < limit]:
            self.warnings.warn(f"{peer.host} has not proved the secret in time")
            del self._pending[peer]
            peer.abort()

    def proved(self, peer: LeadPeer) -> None:
        """A peer has proved the secret."""
        self._pending.pop(peer, None)

    def ended(self, peer: LeadPeer) -> None:
        """A connection has ended; the worker may continue it."""
        self._pending.pop(peer, None)
        uid = peer.uid
        if uid is not None and self._peers.get(uid) is peer:
            del self._peers[uid]
            self._lost[uid] = self._loop.call_later(
                self._settings.grace, self._gone, uid
            )

    def _gone(self, uid: str) -> None:
        """A lost connection was not continued."""
        if (timer := self._lost.pop(uid, None)) is not None:
            timer.cancel()
        self._sessions.pop(uid, None)
        self._decide(Gone(uid, self._heard.pop(uid, None)))

    # Messages

    def received(self, peer: LeadPeer, message: dict[str, Any]) -> None:
        """A message of a worker."""
        kind = message.pop("kind")
        uid = peer.uid
        if uid is None:
            self._greet(peer, kind, message)
        elif kind == "beat":
            self._beat(peer, uid, message)
        else:
            self._sessions[uid].received += 1
            # A beat before it has an older step.
            before = self._heard.get(uid, Beat())
            progress = message.pop("progress", before.progress)
            self._heard[uid] = Beat(None, progress, before.times)
            if kind in JOINT:
                self._collect(uid, kind, message)
                return
            if kind == "broken":
                self._end_graces()
                return
            if kind == "failed":
                message["progress"] = progress
            if kind == "stack":
                self._stalls.answered(
                    self.state.group.ranks.get(uid, -1), message["line"]
                )
            self._decide(EVENTS[kind](uid, **message))

    def _beat(self, peer: LeadPeer, uid: str, message: dict[str, Any]) -> None:
        beat = Beat(message["step"], message["progress"], tuple(message["times"]))
        self._heard[uid] = beat
        if (rank := self.state.group.ranks.get(uid)) is not None:
            *numbers, waits = message["position"]
            self._stalls.beat(rank, numbers, waits, time.monotonic())
        session = self._sessions[uid]
        session.acknowledge(message["got"])
        answer = {"number": message["number"], "got": session.received}
        if self.state.group.ranks.get(uid) == 0:
            answer["times"] = self._some_times()
        peer.send(encoded("beat", answer))

    def _some_times(self) -> dict[int, Any]:
        """Times of the next members in turn, so that beats do not grow with them."""
        ranks = self.state.group.ranks
        first = self._next_times if self._next_times < len(ranks) else 0
        self._next_times = first + _TIMES
        chosen = list(ranks.items())[first : self._next_times]
        workers = self.state.workers
        return {r: workers[u].times for u, r in chosen if u in workers}

    def _end_graces(self) -> None:
        """A collective has failed: lost connections are those of lost workers."""
        for uid in [each for each in self._lost if each in self.state.group.ranks]:
            self._gone(uid)
        if not self._settings.is_fixed:
            for uid in list(self.state.left):
                self._decide(Overdue(uid, f"{EXITED} while others train"))

    def _greet(self, peer: LeadPeer, kind: str, message: dict[str, Any]) -> None:
        if kind != "hello":
            raise WireError("no hello")
        if message["job"] != self._job:
            self._refuse(peer, "the lead there is of another cluster", False)
            return
        if message["run_id"] not in ("", self.run_id):
            self._refuse(peer, "the lead was started again", True)
            return
        uid = str(message["uid"])
        earlier = self._peers.pop(uid, None)
        if earlier is not None:
            # The end of its connection has not arrived.
            earlier.uid = None
            earlier.abort()
        is_known = uid in self._sessions
        is_resumed = bool(is_known and message["continues"])
        if is_known and not is_resumed:
            self._gone(uid)
        if (timer := self._lost.pop(uid, None)) is not None:
            timer.cancel()
        self._end_other_graces(uid, message["index"])
        session = self._sessions.setdefault(uid, Session())
        peer.uid = uid
        self._peers[uid] = peer
        if not self.state.workers and not self.state.group.number:
            self._follow(message.get("settings", {}))
        self._detect_cut_cables(peer.socket)
        facts = {
            n: getattr(self._settings, n) for n in ("timeout", "patience", "grace")
        }
        facts |= {"run_id": self.run_id, "beat_seconds": self.beat_seconds}
        facts |= {"is_resumed": is_resumed, "got": session.received}
        peer.send(encoded("facts", facts))
        if is_resumed:
            session.acknowledge(message["got"])
            peer.send(session.rest())
            return
        named = {name: message[name] for name in _NAMES}
        self._decide(Hello(uid, host=peer.host, **named))

    def _follow(self, settings: dict[str, Any]) -> None:
        """Takes the settings of the first worker, which its script has."""
        self._settings = dataclasses.replace(self._settings, **settings)
        self.state = replace(self.state, settings=self._settings)

    def _end_other_graces(self, uid: str, index: int) -> None:
        """Another process of an index: the one before it does not return."""
        workers = self.state.workers
        for other in [each for each in self._lost if each != uid]:
            if other in workers and workers[other].index == index:
                self._gone(other)

    def _refuse(self, peer: LeadPeer, error: str, is_final: bool) -> None:
        peer.send(encoded("refused", {"error": error, "is_final": is_final}))
        peer.close()

    def _collect(self, uid: str, kind: str, message: dict[str, Any]) -> None:
        """Decides about equal messages together, when all that are here are read."""
        if not self._joint:
            self._loop.call_soon(self._decide_joint)
        key = kind, EVENTS[kind]("", **message)
        self._joint.setdefault(key, []).append(uid)

    def _decide_joint(self) -> None:
        joint, self._joint = self._joint, {}
        for (_, event), (uid, *others) in joint.items():
            self._decide(event._replace(uid=uid, others=tuple(others)))

    def _decide(self, event: Any) -> None:
        if self._joint:
            # They came before.
            self._decide_joint()
        self.state, messages = step(self.state, event)
        for to, kind, body in messages:
            self._send(to, kind, body)

    def _send(self, to: tuple[str, ...], kind: str, body: dict[str, Any]) -> None:
        message = encoded(kind, body)
        for uid in to:
            if (session := self._sessions.get(uid)) is not None:
                session.add(message)
            if (peer := self._peers.get(uid)) is not None:
                peer.send(message)
