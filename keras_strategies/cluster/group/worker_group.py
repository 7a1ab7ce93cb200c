"""Group of connected workers, as seen by one of them."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from keras_strategies.cluster.group.chief_saves import SaveWait
from keras_strategies.cluster.group.group_messages import (
    BEAT,
    EXITED,
    NO_ARRIVAL,
    NO_HEARTBEAT,
    MessageConnection,
    Silence,
)
from keras_strategies.cluster.group.hub import Hub
from keras_strategies.cluster.group.hub_connection import connect, listen
from keras_strategies.cluster.group.stalls import main_thread_place
from keras_strategies.cluster.group.step_clock import (
    StepClock,
    StepTimes,
    others_median,
    slow_workers,
)
from keras_strategies.cluster.spec import split_address
from keras_strategies.errors import ClusterError, WorkerError

# Number of ports after the first address's at which the hub may listen (see `join`).
_MORE_PORTS = 16
# Seconds after the report of a failure in which a wait for other workers may end: the
# worker may have taken part in what is waited for.
FAILURE_GRACE = 2.0
_SAME_CALLS = (
    "Every worker has to call `fit`, `evaluate`, `predict`, `save` and the functions "
    "of the strategy: all run the same script. Move them out of conditions such as "
    "`if task_id == 0:`, and out of loops of different lengths."
)
# The groups of this process; one, outside of tests.
_joined: list[WorkerGroup] = []


def current_group() -> WorkerGroup | None:
    """The group of workers that this process has joined, or None."""
    return _joined[0] if _joined else None


@dataclass(frozen=True)
class LostWorker:
    """A lost worker.

    Args:
        index: int, the worker's index.
        how: str, the reason.
        progress: str, its last step, such as `"step 12 of fit"`.
        host: str, its address.
        pid: int, its process.
    """

    index: int
    how: str
    progress: str
    host: str
    pid: int

    @property
    def is_silent(self) -> bool:
        """Whether it was lost without the end of its connection."""
        return self.how.startswith((NO_HEARTBEAT, NO_ARRIVAL))

    @property
    def has_exited(self) -> bool:
        """Whether its script ended, without an error, while others wait."""
        return self.how.startswith(EXITED)

    def __str__(self) -> str:
        at = f" at {self.progress}" if self.progress else ""
        return (
            f"Worker {self.index} ({self.host}, process {self.pid}) was lost{at}: "
            f"{self.how.removesuffix('.')}."
        )


class WorkerGroup:
    """The connected workers of a cluster.

    Use `join`.

    Args:
        index: int, the number of this worker; 0 is the chief.
        members: the information of each worker; `"host"` is its address.
        connection: the connection to the hub.
        hub: the hub, in the chief's process.
        timeout: float, seconds without a heartbeat until a worker is lost.
        patience: float, seconds to wait for workers that are alive; None for `timeout`.
    """

    def __init__(
        self,
        index: int,
        members: list[dict[str, Any]],
        connection: MessageConnection,
        hub: Hub | None,
        timeout: float,
        patience: float | None = None,
    ):
        self.index = index
        self.members = members
        self.count = len(members)
        self.timeout = timeout
        self.patience = timeout if patience is None else max(timeout, patience)
        #: Progress of this worker, such as "step 12 of fit", sent to the others.
        self.progress = ""
        # The steps that have begun since the last collective of the group.
        self._steps_since = 0
        # The last report about awaited workers, and this worker's position then.
        self._stall: tuple[str, list[int]] = ("", [])
        self.clock = StepClock()
        #: Times of all workers' last steps, by index, from their heartbeats.
        self.times = (StepTimes(),) * self.count
        self._connection = connection
        self._hub = hub
        self._numbers: dict[str, int] = {}
        self._condition = threading.Condition()
        self._results: dict[tuple[str, int], tuple[dict[str, Any], bytes]] = {}
        # Names of files that were saved since the last collective, and its number.
        self._saves: tuple[int, list[str]] = (0, [])
        self._saved: dict[tuple[int, int], str | None] = {}
        self._loss: LostWorker | None = None
        #: The last worker that has come to the end of its script.
        self.left: LostWorker | None = None
        self._failure: LostWorker | None = None
        # When it was reported, and the call that the worker has left by it.
        self._failed_at = 0.0
        self._failed_call = 0
        # The number of calls of methods that have begun, and those under way.
        self._calls = 0
        self._open_calls: list[int] = []
        self._silence = Silence()
        self._chief_progress = ""
        self._is_stopping = False
        self._begun = 0
        self._last_step: int | None = None
        self._closed = threading.Event()
        self._on_loss: list[Callable[[LostWorker], None]] = []
        self._on_failure: list[Callable[[], None]] = []
        for target in (self._read, self._beat):
            threading.Thread(target=target, name="group", daemon=True).start()

    # Rendezvous.

    @classmethod
    def join(
        cls,
        addresses: list[str],
        index: int,
        same: dict[str, Any],
        info: dict[str, Any] | None = None,
        timeout: float = 300.0,
        *,
        job: str | None = None,
        shares_port: bool = False,
        absence: Callable[[], str | None] = lambda: None,
    ) -> WorkerGroup:
        """Connects to the hub and waits for all workers.

        Args:
            addresses: the workers' addresses; the first is the chief's, where the hub
                listens.
            index: int, the number of this worker.
            same: dict of values that must agree on all workers, by name.
            info: dict, further information for the other workers.
            timeout: float, seconds to wait, and between heartbeats later.
            job: str, identifies this cluster among others at the same address; None to
                use the addresses.
            shares_port: bool, whether another program listens at the chief's port, as
                under torchrun; the hub then uses one of the next ports.
            absence: callable, says on the chief why a worker cannot come, which ends
                the wait with an error; None while all may.

        Returns:
            A `WorkerGroup`.

        Raises:
            ValueError: if the chief cannot listen at its address, two workers have one
                index, or workers disagree.
            WorkerError: if workers did not connect in time.
        """
        name = job or hashlib.sha256(json.dumps(addresses).encode()).hexdigest()[:16]
        host, port = split_address(addresses[0])
        shift = range(1, _MORE_PORTS) if shares_port else range(1)
        ports = [port + each for each in shift]
        hub = None
        if index == 0:
            hub = Hub(listen(host, ports), name, addresses, timeout, absence)
        own = {**(info or {}), "same": same, "pid": os.getpid()}
        hello = {"kind": "hello", "job": name, "index": index, "info": own}
        try:
            connection, members = connect(host, ports, hello, timeout)
        except BaseException:
            if hub is not None:
                hub.close()
            raise
        return cls.over(index, members, connection, hub, timeout)

    @classmethod
    def over(
        cls,
        index: int,
        members: list[dict[str, Any]],
        connection: MessageConnection,
        hub: Hub | None,
        timeout: float,
        patience: float | None = None,
    ) -> WorkerGroup:
        """The group of a worker that is connected to the hub (see the constructor)."""
        group = cls(index, members, connection, hub, timeout, patience)
        _joined.append(group)
        return group

    @property
    def own_host(self) -> str:
        """str, the address by which the others reach this worker."""
        return str(self.members[self.index]["host"])

    @property
    def is_chief(self) -> bool:
        """bool, whether this worker is the chief."""
        return self.index == 0

    # Exchange of bytes and values.

    def gather(self, what: str, payload: bytes, stream: str = "") -> list[bytes]:
        """Every worker's bytes, on every worker.

        Args:
            what: str, name of the gathered values; the same on all workers.
            payload: bytes of this worker.
            stream: str, separates the calls of different threads: the n-th call of a
                stream matches the n-th one of the other workers.

        Returns:
            list of bytes, by worker.

        Raises:
            WorkerError: if a worker is lost, or gathers something else.
        """
        runs = self._gather_runs(what, payload, stream)
        return [part for part, count in runs for _ in range(count)]

    def _gather_runs(
        self, what: str, payload: bytes, stream: str
    ) -> list[tuple[bytes, int]]:
        """As `gather`: parts, each with the number of workers in a row that have it."""
        number = self._numbers.get(stream, 0)
        self._numbers[stream] = number + 1
        if not stream:
            self._steps_since = 0
        key = (stream, number)
        header = {
            "kind": "gather",
            "stream": stream,
            "number": number,
            "what": what,
            "progress": self.progress,
        }
        self._connection.send(header, payload)
        until = time.monotonic() + self.patience
        # Waits of other threads, such as for a later batch, delay no step.
        wait = contextlib.nullcontext() if stream else self.clock.waiting()
        with wait, self._condition:
            while key not in self._results:
                self.check()
                if (failure := self.failure_since(FAILURE_GRACE)) is not None:
                    raise WorkerError(self.describe(failure))
                if time.monotonic() > until:
                    # The loss of a stopped worker is detected a moment later.
                    self.loss(wait=2.0)
                    self.check()
                    raise WorkerError(
                        f"Not all workers reached {what!r} within {self.patience:g} "
                        "s. " + self._hint()
                    )
                self._condition.wait(BEAT)
            answer, joined = self._results.pop(key)
        runs, other, start = [], 0, 0
        for other_what, size, count in answer["runs"]:
            if other_what != what:
                raise WorkerError(
                    f"Worker {self.index} is at {what!r} but worker {other} is at "
                    f"{other_what!r}. All workers must make the same calls in the "
                    "same order; check for branches that depend on the worker's "
                    "index or its data."
                )
            runs.append((joined[start : start + size], count))
            other, start = other + count, start + size
        return runs

    def _hint(self) -> str:
        if self._failure is not None:
            return str(self._failure)
        hint = "CommunicationOptions(timeout_seconds=...) sets this timeout."
        return f"{self.stall} {hint}".lstrip()

    @property
    def position(self) -> list[int]:
        """list of int that grows; equal where workers have made the same calls."""
        return [self._numbers.get("", 0), self._steps_since]

    def count_steps(self, count: int) -> None:
        """Counts steps that have begun, or with a negative number have not."""
        self._steps_since += count

    @property
    def stall(self) -> str:
        """str, the report about workers that this one waits for; empty without one."""
        text, position = self._stall
        return text if position == self.position else ""

    def gather_values(self, what: str, value: Any, stream: str = "") -> list[Any]:
        """Every worker's JSON value, on every worker."""
        runs = self._gather_runs(what, json.dumps(value).encode(), stream)
        values = [(json.loads(part), count) for part, count in runs]
        return [value for value, count in values for _ in range(count)]

    def broadcast(self, what: str, payload: bytes | None) -> bytes:
        """The chief's bytes on every worker."""
        return self.gather(what, (payload or b"") if self.is_chief else b"")[0]

    def barrier(self, what: str) -> None:
        """Waits until all workers have arrived."""
        self.gather(what, b"")

    def agree(self, what: str, value: Any) -> None:
        """Checks that a JSON value is the same on all workers.

        Raises:
            ValueError: with the values of the workers that differ.
        """
        value = json.loads(json.dumps(value))
        for other, found in enumerate(self.gather_values(what, value)):
            if found != value:
                raise ClusterError(
                    f"Workers disagree on {what}: worker {self.index} has "
                    f"{_short(value)}, worker {other} has {_short(found)}. Run the "
                    "same script on the same data on all workers."
                )

    # Files of the chief.

    def report_saved(self, path: str, error: str = "") -> None:
        """Ends the wait of other workers for a file; called by the chief.

        Args:
            path: str; empty for targets that are not files.
            error: str, the reason why saving failed.
        """
        position, name = self._numbers.get("", 0), os.path.basename(path)
        self._connection.send(
            {"kind": "saved", "position": position, "name": name, "error": error}
        )

    def wait_saved(self, path: str) -> None:
        """Waits for the chief's call that corresponds to one of this worker.

        Args:
            path: str; empty for targets that are not files.

        Raises:
            WorkerError: if the chief is lost, fails, or does not make the call.
        """
        position, name = self._numbers.get("", 0), os.path.basename(path)
        if self._saves[0] != position:
            self._saves = (position, [])
        names = self._saves[1]
        names.append(name)
        wait = SaveWait(self.index, position, name, names.count(name), len(names))
        key = (position, wait.calls)
        with self.clock.waiting():
            for any_name, seconds in ((False, self.patience), (True, 2.0)):
                wait = dataclasses.replace(wait, any_name=any_name)
                self._connection.send(
                    {"kind": "await_save", **dataclasses.asdict(wait)}
                )
                if self._await_saved(key, seconds):
                    break
            else:
                raise WorkerError(
                    f"The chief, worker 0, did not save {path!r} within "
                    f"{self.patience:g} s. {self._hint()}"
                )
        problem = self._saved.pop(key)
        if problem is not None:
            raise WorkerError(
                f"Worker {self.index} waited for the chief, worker 0, which saves "
                f"{path!r} for all workers: {problem}."
            )

    def _await_saved(self, key: tuple[int, int], seconds: float) -> bool:
        until = time.monotonic() + seconds
        with self._condition:
            while key not in self._saved and time.monotonic() < until:
                self.check()
                self._condition.wait(BEAT)
            return key in self._saved

    # Stop after a common step.

    def request_stop(self) -> None:
        """Requests that all workers stop after the same step; from any thread."""
        self._connection.send({"kind": "stop"})

    def begin_step(self) -> bool:
        """Requests permission for another step.

        After a request to stop, every worker reports how many steps it has begun and
        waits. All workers finish the furthest of these steps, and stop there.

        Returns:
            Whether the step may begin; False for all workers after the same step.

        Raises:
            WorkerError: if a worker is lost.
        """
        with self._condition:
            while self._is_stopping and self._last_step is None:
                self.check()
                self._condition.wait(BEAT)
            if self._last_step is not None and self._begun >= self._last_step:
                return False
            self._begun += 1
            return True

    def resume(self) -> None:
        """Clears the request to stop, and counts steps from 0 again."""
        with self._condition:
            self._is_stopping, self._last_step, self._begun = False, None, 0

    # Heartbeats and losses.

    def check(self) -> None:
        """Raises `WorkerError` if a worker is lost."""
        if self._loss is not None:
            raise WorkerError(self.describe(self._loss))

    def describe(self, loss: LostWorker) -> str:
        """Message about a loss."""
        own = f" This is worker {self.index}"
        own += f", at {self.progress}." if self.progress else "."
        if loss.has_exited:
            return f"{loss}{own} {_SAME_CALLS}"
        late = self.lateness(loss.index)
        return (
            f"{loss}{late}{own} Training cannot continue without it. Restart all "
            "workers; with ks.callbacks.Resume they continue at their last snapshot."
        )

    def slow_workers(self) -> list[int]:
        """Indices of workers that take twice the median of the others over 20 steps."""
        return slow_workers(self.times)

    def lateness(self, index: int) -> str:
        """A sentence about the time of a worker's steps; may be empty."""
        if len(self.times) < 2 or not self.times[index].steps:
            return ""
        times = self.times[index]
        return (
            f" Its last steps took {1000 * times.own:.0f} ms each without waits for "
            "other workers, those of the others "
            f"{1000 * others_median(self.times, index):.0f} ms."
        )

    def loss(self, wait: float = 0.0) -> LostWorker | None:
        """The lost or failed worker, if it is detected within `wait` seconds."""
        until = time.monotonic() + wait
        with self._condition:
            while self._loss is None and self._failure is None:
                left = until - time.monotonic()
                if left <= 0:
                    return None
                self._condition.wait(min(left, BEAT))
            return self._loss or self._failure

    def on_loss(self, callback: Callable[[LostWorker], None]) -> None:
        """Calls `callback`, on a thread, when a worker is lost."""
        self._on_loss.append(callback)

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """Context manager around a call that all workers make."""
        self._calls += 1
        self._open_calls.append(self._calls)
        try:
            yield
        finally:
            self._open_calls.pop()

    def report(self, error: BaseException) -> None:
        """Reports the error by which this worker leaves a call to the others."""
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        call = self._open_calls[-1] if self._open_calls else 0
        self._connection.send(
            {"kind": "failed", "how": text, "progress": self.progress, "call": call}
        )

    def failure_since(self, seconds: float) -> LostWorker | None:
        """A worker that left a call that is under way here, some seconds ago."""
        failure = self._failure
        if failure is None or self._failed_call not in self._open_calls:
            return None
        return failure if time.monotonic() - self._failed_at >= seconds else None

    def on_failure(self, callback: Callable[[], None]) -> None:
        """Calls `callback`, on a thread, when a worker has reported its failure."""
        self._on_failure.append(callback)

    def leave(self) -> None:
        """Leaves the group."""
        if self._closed.is_set():
            return
        self._closed.set()
        if self in _joined:
            _joined.remove(self)
        self._connection.send({"kind": "bye"})
        if self._hub is not None:
            # The others may still send messages.
            time.sleep(2 * BEAT)
            self._hub.close()
        self._connection.close()

    def abandon(self) -> None:
        """Ends the group at once: the others see the end of the connection."""
        if self._closed.is_set():
            return
        with self._condition:
            self._closed.set()
            if self._loss is None:
                self._loss = self._own_loss("it left the group")
            self._condition.notify_all()
        if self in _joined:
            _joined.remove(self)
        if self._hub is not None:
            self._hub.close(abort=True)
        self._connection.abort()

    def end(self, how: str) -> None:
        """Ends all calls that wait for other workers, with an error."""
        self._lost(self._own_loss(how))

    def _own_loss(self, how: str) -> LostWorker:
        own = self.members[self.index]
        host, pid = str(own["host"]), int(own["pid"])
        return LostWorker(self.index, how, self.progress, host, pid)

    def _beat(self) -> None:
        while not self._closed.wait(BEAT):
            times = dataclasses.astuple(self.clock.times)
            beat = {
                "kind": "beat",
                "progress": self.progress,
                "times": times,
                "position": [self.position, self.clock.wait_seconds],
            }
            self._connection.send(beat)
            silent = self._silence.count()
            if silent > self.timeout:
                self._chief_lost(f"{NO_HEARTBEAT} for {silent:.0f} s")

    def _chief_lost(self, how: str) -> None:
        chief = self.members[0]
        place = str(chief["host"]), int(chief["pid"])
        progress = self._chief_progress
        if self._failure is not None and self._failure.index == 0:
            # Its own failure report has more details than the lost connection.
            how, progress = self._failure.how, self._failure.progress
        elif self.left is not None and self.left.index == 0:
            how, progress = self.left.how, self.left.progress
        self._lost(LostWorker(0, how, progress, *place))

    def _lost(self, loss: LostWorker) -> None:
        with self._condition:
            if self._loss is not None or self._closed.is_set():
                return
            self._loss = loss
            self._condition.notify_all()
        for callback in self._on_loss:
            callback(loss)

    def _read(self) -> None:
        try:
            while not self._closed.is_set():
                received = self._connection.receive()
                if received is not None:
                    self._silence.reset()
                    self._handle(*received)
        except EOFError:
            if not self._closed.is_set():
                self._chief_lost("its process or its connection ended")

    def _handle(self, header: dict[str, Any], payload: bytes) -> None:
        kind = header.get("kind")
        if kind == "beat":
            self._chief_progress = header["progress"]
            times = list(self.times)
            for index, each in header["times"].items():
                times[int(index)] = StepTimes(*each)
            self.times = tuple(times)
        elif kind == "gathered":
            self._chief_progress = header["progress"]
            with self._condition:
                stream, number = header["key"]
                self._results[stream, number] = (header, payload)
                # All workers arrived, so a failure that was reported before has been
                # handled. The next one may come before the answer is read.
                self._failure, self._stall = None, ("", [])
                self._condition.notify_all()
        elif kind == "where":
            # Its own thread: the main thread may never return.
            where = main_thread_place()
            answer = {"kind": "where", "progress": self.progress, "where": where}
            self._connection.send(answer)
        elif kind == "stall":
            self._stall = (header["text"], self.position)
        elif kind == "chief_saved":
            with self._condition:
                key = (header["position"], header["calls"])
                self._saved[key] = header["problem"]
                self._condition.notify_all()
        elif kind == "stop":
            with self._condition:
                self._is_stopping = True
                self._connection.send({"kind": "begun", "count": self._begun})
        elif kind == "stop_after":
            with self._condition:
                self._last_step = int(header["count"])
                self._condition.notify_all()
        elif kind in ("lost", "failed", "left"):
            names = ("index", "how", "progress", "host", "pid")
            loss = LostWorker(**{name: header[name] for name in names})
            if kind == "left":
                if loss.index != self.index:
                    self.left = loss
                return
            if kind == "lost":
                if loss.index != self.index:
                    self._lost(loss)
                return
            with self._condition:
                self._failure, self._failed_at = loss, time.monotonic()
                self._failed_call = header["call"]
                self._condition.notify_all()
            for callback in self._on_failure:
                callback()


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 300 else f"{text[:300]}..."
