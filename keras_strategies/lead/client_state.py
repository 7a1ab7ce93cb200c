"""What a worker knows of its group, and how the lead's messages change it."""

from __future__ import annotations

import os
import secrets
import ssl
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

from keras_strategies.errors import ClusterError, WorkerError
from keras_strategies.lead.connection import BEAT, LeadConnection
from keras_strategies.lead.state import Loss, Settings
from keras_strategies.timeline.places import main_thread_place

_FINISHED = (
    "The workers that trained have ended, so this one cannot join them. Restart all "
    "workers."
)


class TrainingEnded(WorkerError):
    """The other workers have finished training."""


class GroupChanged(WorkerError):
    """The generation has ended: leave it, and call `next_generation`.

    Args:
        how: str, the reason.
        loss: `Loss`; None without a lost worker.
    """

    def __init__(self, how: str, loss: Loss | None = None):
        super().__init__(how)
        self.loss = loss


@dataclass(frozen=True)
class JoinedGeneration:
    """The workers between two changes.

    Args:
        number: int, counted from 1.
        step: int, the finished steps at its begin; None before the first.
        rank: int, this worker's; 0 is the chief, which has the state.
        members: the workers' numbers in the cluster, by rank.
        hosts: their addresses, by rank.
        pids: their processes, by rank.
        behind: ranks of the workers that need the state of the chief.
        lost: numbers of the previous generation's workers that are not members.
        joined: numbers of the members that were not in the previous generation.
        how: str, why the generation before has ended.
    """

    number: int
    step: int | None
    rank: int
    members: tuple[int, ...]
    hosts: tuple[str, ...]
    pids: tuple[int, ...]
    behind: tuple[int, ...]
    lost: tuple[int, ...]
    joined: tuple[int, ...]
    how: str

    @property
    def is_behind(self) -> bool:
        """bool, whether this worker needs the state of the chief."""
        return self.rank in self.behind


class GroupListener:
    """What happens to a group, on the client's thread; does nothing by itself."""

    def beat(self) -> dict[str, Any]:
        """The `times` of `Beat`, and the `position` and waits of `StallWatch.beat`."""
        return {"times": (), "position": (0, 0, 0.0)}

    def ended(self, how: str, loss: Loss | None) -> None:
        """The generation has ended; ends the waits of the engine."""

    # Messages of the lead, by their kinds.

    def failed(self, call: int, **report: Any) -> None:
        """A worker leaves a call by an error; `report` has the arguments of `Loss`."""

    def compared(self, **values: Any) -> None:
        """All workers have arrived in a comparison."""

    def exited(self, loss: list[Any]) -> None:
        """A worker has come to the end of its script."""

    def stalled(self, text: str) -> None:
        """Others wait for workers, which the text names."""

    def arrival(self, index: int, count: int) -> None:
        """A worker has connected before training; told to worker 0."""


@dataclass(eq=False)
class Offered:
    """A value that this worker compares with the others.

    Args:
        key: its stream, and its number there.
        generation: int, the number of the generation.
        answer: the lead's; empty before.
    """

    key: tuple[str, int]
    generation: int
    answer: dict[str, Any] = field(default_factory=dict)


class ClientState:
    """State of a worker; its arguments are those of `LeadClient`."""

    def __init__(
        self,
        addresses: list[tuple[str, int]],
        secret: bytes,
        index: int,
        same: dict[str, Any] | None = None,
        *,
        job: str = "",
        timeout: float = 60.0,
        listener: GroupListener | None = None,
        settings: Settings | None = None,
        tls: ssl.SSLContext | None = None,
    ):
        self.index, self._job, self._same = index, job, same or {}
        self._settings = {} if settings is None else settings.of_workers
        #: What happens to the group is reported to it.
        self.listener = listener or GroupListener()
        self._uid = f"{os.getpid()}-{secrets.token_hex(8)}"
        #: The last finished step, None without a state; and such as "step 12 of fit".
        self.step: int | None = None
        self.progress = ""
        #: `times` of other workers by rank, on the chief.
        self.times_of: dict[int, tuple[float, ...]] = {}
        #: bool, whether the others trained when this worker came.
        self.is_running = False
        #: bool, whether the others may train without this worker by now.
        self.is_excluded = False
        self._error: Exception | None = None
        self._loss: Loss | None = None
        self._generation: JoinedGeneration | None = None
        self._is_going, self._how = False, "it has not begun"
        self._begun, self._is_pausing = 0, False
        self._last_step: int | None = None
        self._is_planned = False
        self._numbers: dict[str, int] = {}
        # Without those that are not read again.
        self._offered = WeakValueDictionary[tuple[str, int], Offered]()
        self._files: dict[tuple[int, int], str] = {}
        # Names of files since the last comparison, and its number.
        self._saves: tuple[int, list[str]] = (0, [])
        self._status: dict[str, Any] = {}
        # Whether a state of this worker is that of the group (see `generations.py`).
        self._has_state = False
        # What is said again after the connection was lost.
        self._call: tuple[str, dict[str, Any]] | None = None
        self._is_welcome = self._has_left = False
        self._connection = LeadConnection(addresses, secret, self, timeout, tls)
        self._changed = self._connection.changed
        self._connection.start()
        try:
            with self._changed:
                self._wait(lambda: self._is_welcome)
        except BaseException:
            self._connection.close()
            raise

    @property
    def end(self) -> tuple[str, Loss | None] | None:
        """The reason why the generation has ended, and the loss; None while it runs."""
        with self._changed:
            return (self._how, self._loss) if self._how else None

    @property
    def timeout(self) -> float:
        """float, seconds of silence after which a worker is lost."""
        return self._connection.timeout

    @property
    def patience(self) -> float:
        """float, seconds for which workers that are alive are awaited."""
        return self._connection.patience

    @property
    def run_id(self) -> str:
        """str, the lead's name of this run."""
        return self._connection.run_id

    @property
    def own_host(self) -> str:
        """str, the address from which this worker reaches the lead."""
        return self._connection.own_host

    @property
    def generation(self) -> JoinedGeneration:
        """The current or last generation."""
        assert self._generation is not None
        return self._generation

    # Waits and messages of the training thread

    def _check(self, in_generation: bool) -> None:
        if self._error is not None:
            raise self._error
        if in_generation and self._how:
            raise GroupChanged(self._how, self._loss)

    def _wait(
        self,
        is_done: Callable[[], bool],
        in_generation: bool = False,
        meanwhile: Callable[[], None] = lambda: None,
        *,
        is_answer: bool = False,
    ) -> None:
        """Waits; `_changed` is held. The lead sets the limits of waits.

        With `is_answer`, an answer counts that came before the end of the generation:
        other members have it, too.
        """
        while True:
            if is_answer and is_done():
                return
            self._check(in_generation)
            if is_done():
                return
            meanwhile()
            self._changed.wait(BEAT)

    def _send_in_generation(self, kind: str, body: dict[str, Any]) -> None:
        number = self.generation.number
        self._connection.send(kind, {"generation": number, **body})

    # The thread (see `connection.User`)

    def hello(self) -> dict[str, Any]:
        with self._changed:
            return {
                "uid": self._uid,
                "index": self.index,
                "pid": os.getpid(),
                "job": self._job,
                "same": self._same,
                "settings": self._settings,
                "generation": self._number,
                "step": self.step,
            }

    def begin_again(self) -> list[tuple[str, dict[str, Any]]]:
        return [] if self._call is None else [self._call]

    def beat(self) -> dict[str, Any]:
        return {"step": self.step, "progress": self.progress, **self.listener.beat()}

    def lost(self, problem: str) -> None:
        host, port = self._connection.addresses[0]
        beside, group = "", self._generation
        if group is not None and host in group.hosts:
            rank = group.hosts.index(host)
            worker, pid = group.members[rank], group.pids[rank]
            beside = f", on the host of worker {worker} (process {pid}),"
        how = f"the connection to the lead at {host}:{port}{beside} was lost: {problem}"
        self._end(how, None)

    def failed(self, problem: str, was_reached: bool) -> None:
        host, port = self._connection.addresses[0]
        where, seconds = f"{host}:{port}", f"{self.timeout:g} s"
        if was_reached:
            text = (
                f"Worker {self.index} has lost the lead at {where}: {problem}. If the "
                "others train on, start this worker again, and it joins them. "
                "Otherwise start all workers again; with ks.callbacks.Resume they "
                "continue at their last snapshot."
            )
        else:
            text = (
                f"Worker {self.index} could not reach the chief at {where} for "
                f"{seconds}: {problem}. Check that it was started, that the first "
                "address of the cluster is correct, and that no firewall blocks this "
                "machine. `CommunicationOptions(timeout_seconds=...)` sets this "
                "timeout."
            )
        self._fail(WorkerError(text))

    def received(self, kind: str, message: dict[str, Any]) -> None:
        handle = getattr(self, f"_handle_{kind}", None)
        if handle is not None:
            with self._changed:
                handle(message)
                self._changed.notify_all()
        if kind == "end" and message["generation"] == self._number:
            self._end(message["how"], _loss(message))
        elif kind == "over":
            self._over(message)
        elif kind in ("failed", "compared", "exited", "stalled", "arrival"):
            getattr(self.listener, kind)(**message)
        elif kind == "where":
            # This thread answers: the main thread may never return.
            body = {"line": main_thread_place(), "progress": self.progress}
            self._connection.send("stack", body)
        elif kind == "log":
            print(f"keras_strategies: {message['text']}", file=sys.stderr, flush=True)

    @property
    def _number(self) -> int:
        return self._generation.number if self._generation else 0

    def _end(self, how: str, loss: Loss | None) -> None:
        with self._changed:
            was_active = not self._how
            if was_active:
                self._how, self._loss = how, loss
                own = self._generation.rank if self._generation else -1
                self.is_excluded |= loss is not None and loss.rank == own
            self._changed.notify_all()
        if was_active:
            self.listener.ended(how, loss)

    def _over(self, message: dict[str, Any]) -> None:
        text = message["error"]
        if not text:
            self._fail(TrainingEnded(_FINISHED))
            return
        error = (ClusterError if message["is_misuse"] else WorkerError)(text)
        self._fail(error, _loss(message))

    def _fail(
        self, error: WorkerError | ClusterError, loss: Loss | None = None
    ) -> None:
        with self._changed:
            if self._error is None and not self._has_left:
                self._error = error
            self._changed.notify_all()
        self._end(error.text, loss)

    # Messages of the lead; `_changed` is held

    def _handle_welcome(self, message: dict[str, Any]) -> None:
        self.is_running, self._is_welcome = message["is_running"], True
        self.is_excluded |= message["generation"] > self._number > 0

    def _handle_beat(self, message: dict[str, Any]) -> None:
        for rank, times in message.get("times", {}).items():
            self.times_of = {**self.times_of, int(rank): tuple(times)}

    def _handle_begin(self, message: dict[str, Any]) -> None:
        members = tuple(message["members"])
        self._generation = JoinedGeneration(
            message["generation"],
            None if message["is_first"] else message["step"],
            members.index(self.index),
            members,
            tuple(message["hosts"][place] for place in message["places"]),
            tuple(message["pids"]),
            tuple(message["behind"]),
            tuple(message["lost"]),
            tuple(message["joined"]),
            message["how"],
        )
        self._how, self._loss, self._is_going = "", None, False
        self.is_excluded = False
        self._has_state |= not message["is_first"]
        self._is_pausing, self._last_step, self._begun = False, None, 0
        self._numbers, self._files = {}, {}
        self._saves, self.times_of = (0, []), {}

    def _handle_go(self, message: dict[str, Any]) -> None:
        self._is_going = self._has_state = True

    def _handle_pause(self, message: dict[str, Any]) -> None:
        self._is_pausing, self._last_step = True, None
        self._send_in_generation("begun", {"steps": self._begun})

    def _handle_stop_after(self, message: dict[str, Any]) -> None:
        self._last_step = message["count"]

    def _handle_compared(self, message: dict[str, Any]) -> None:
        offered = self._offered.pop(tuple(message.pop("key")), None)
        if offered is not None:
            offered.answer = message

    _handle_late = _handle_compared

    def _handle_file(self, message: dict[str, Any]) -> None:
        self._files[message["position"], message["calls"]] = message["error"]

    def _handle_status(self, message: dict[str, Any]) -> None:
        self._status = message

    def _handle_bye(self, message: dict[str, Any]) -> None:
        self._has_left = True


def _loss(message: dict[str, Any]) -> Loss | None:
    return None if message["loss"] is None else Loss(*message["loss"])
