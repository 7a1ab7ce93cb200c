"""Group of connected workers, as seen by one of them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from keras_strategies.cluster.group.alone import AloneClient
from keras_strategies.cluster.group.lead_start import connected, reap
from keras_strategies.cluster.group.step_clock import (
    StepClock,
    StepTimes,
    slow_workers,
)
from keras_strategies.cluster.startup_report import Progress
from keras_strategies.errors import ClusterError, WorkerError
from keras_strategies.lead.client import LeadClient
from keras_strategies.lead.client_state import (
    GroupChanged,
    GroupListener,
    TrainingEnded,
)
from keras_strategies.lead.connection import BEAT
from keras_strategies.lead.state import Loss, Settings, lateness
from keras_strategies.timeline import recording, runs

_logger = logging.getLogger("keras_strategies.cluster")
# Seconds after the report of a failure in which a wait for other workers may end: the
# worker may have taken part in what is waited for.
FAILURE_GRACE = 2.0
_SAME_CALLS = (
    "Every worker has to call `fit`, `evaluate`, `predict`, `save` and the functions "
    "of the strategy: all run the same script. Move them out of conditions such as "
    "`if task_id == 0:`, and out of loops of different lengths."
)
# Other machines that `keras-strategies top` names.
_NAMED_HOSTS = 4
# The groups of this process; one, outside of tests.
_joined: list[WorkerGroup] = []


def current_group() -> WorkerGroup | None:
    """The group of workers that this process has joined, or None."""
    return _joined[0] if _joined else None


class _Starting(GroupListener):
    """Reports the workers that connect before training, in the process of worker 0."""

    def __init__(self, addresses: list[str]):
        self._addresses = addresses
        self._progress = Progress()
        count = len(addresses)
        self._progress.report(f"waiting for {count} workers at {addresses[0]}")

    def arrival(self, index: int, count: int) -> None:
        self._progress.report(
            f"worker {index} is ready at {self._addresses[index]}, {count} of "
            f"{len(self._addresses)}"
        )


class WorkerGroup(GroupListener):
    """The connected workers of a cluster, in one generation.

    Use `join`.

    Args:
        client: the connection to the lead, in the generation of the group.
    """

    def __init__(self, client: LeadClient | AloneClient):
        self._client = client
        self._generation = generation = client.generation
        self.index = generation.rank
        #: The index, host and process of each worker.
        self.members: list[dict[str, Any]] = [
            {"index": index, "host": host, "pid": pid}
            for index, host, pid in zip(
                generation.members, generation.hosts, generation.pids, strict=True
            )
        ]
        self.count = len(self.members)
        self.timeout, self.patience = client.timeout, client.patience
        # The steps that have begun since the last collective of the group.
        self._steps_since = 0
        # The last report about awaited workers, and this worker's position then.
        self._stall: tuple[str, list[int]] = ("", [])
        self.clock = StepClock()
        self._times: tuple[Any, tuple[StepTimes, ...]] = (None, ())
        self._position = 0
        self._condition = threading.Condition()
        self._loss: Loss | None = None
        #: str, the error of an end without another lost worker; empty before.
        self.end_text = ""
        #: The last worker that has come to the end of its script.
        self.left: Loss | None = None
        self._failure: Loss | None = None
        # When it was reported, and the call that the worker has left by it.
        self._failed_at = 0.0
        self._failed_call = 0
        # The number of calls of methods that have begun, and those under way.
        self._calls = 0
        self._open_calls: list[int] = []
        self._is_closed = False
        self._on_loss: list[Callable[[Loss], None]] = []
        self._on_failure: list[Callable[[], None]] = []
        facts: dict[str, Any] = {"run": client.run_id} if client.run_id else {}
        number = generation.members[self.index]
        facts |= {"processes": self.count, "others": self._other_hosts()}
        self._recorder = recording.start(worker=number, host=self.own_host, **facts)
        client.listener = self
        if (end := client.end) is not None:
            self.ended(*end)

    def _other_hosts(self) -> str:
        """Where `keras-strategies top` shows the workers of other machines."""
        hosts = sorted({each["host"] for each in self.members} - {self.own_host})
        if len(hosts) > _NAMED_HOSTS:
            hosts[_NAMED_HOSTS:] = [f"{len(hosts) - _NAMED_HOSTS} more"]
        return (
            f"Others are on {', '.join(hosts)}: `keras-strategies top` there shows "
            "them, and `strategy.status()` in the script all workers."
            if hosts
            else ""
        )

    # Rendezvous.

    @classmethod
    def join(
        cls,
        addresses: list[str],
        index: int,
        same: dict[str, Any],
        timeout: float = 300.0,
        *,
        job: str | None = None,
        shares_port: bool = False,
        absence: Callable[[], str | None] = lambda: None,
    ) -> WorkerGroup:
        """Connects to the lead and waits for all workers.

        Args:
            addresses: the workers' addresses; the first is the chief's, where it starts
                the lead.
            index: int, the number of this worker.
            same: dict of values that must agree on all workers, by name.
            timeout: float, seconds to wait, and between heartbeats later.
            job: str, identifies this cluster among others at the same address; None to
                use the addresses.
            shares_port: bool, whether another program listens at the chief's port, as
                under torchrun; the lead then uses one of the next ports.
            absence: callable, says on the chief why a worker cannot come, which ends
                the wait with an error; None while all may.

        Returns:
            A `WorkerGroup`.

        Raises:
            ValueError: if the chief cannot listen at its address, two workers have one
                index, or workers disagree.
            WorkerError: if workers did not connect in time.
        """
        settings = Settings(
            len(addresses),
            is_fixed=True,
            timeout=timeout,
            patience=timeout,
            addresses=tuple(addresses),
        )
        listener = _Starting(addresses) if index == 0 else GroupListener()
        client = connected(
            settings, index, same, job, listener, shares_port=shares_port
        )

        def check_absence() -> None:
            if index == 0 and (why := absence()) is not None:
                client.report_absence(why)

        try:
            client.next_generation(None, meanwhile=check_absence)
            client.confirm(None)
        except BaseException:
            client.leave()
            raise
        return cls.over(client)

    @classmethod
    def over(cls, client: LeadClient | AloneClient) -> WorkerGroup:
        """The group of a worker's current generation."""
        group = cls(client)
        _joined.append(group)
        return group

    @property
    def progress(self) -> str:
        """str, of this worker, such as "step 12 of fit", sent to the others."""
        return self._client.progress

    @progress.setter
    def progress(self, text: str) -> None:
        self._client.progress = text

    @property
    def own_host(self) -> str:
        """str, the address by which the others reach this worker."""
        return str(self.members[self.index]["host"])

    @property
    def _number(self) -> int:
        """int, of this worker in the cluster."""
        return int(self.members[self.index]["index"])

    @property
    def is_chief(self) -> bool:
        """bool, whether this worker is the chief."""
        return self.index == 0

    # Exchange of values.

    def gather_values(self, what: str, value: Any, stream: str = "") -> list[Any]:
        """Every worker's JSON value, on every worker.

        Args:
            what: str, name of the gathered values; the same on all workers.
            value: that of this worker.
            stream: str, separates the calls of different threads: the n-th call of a
                stream matches the n-th one of the other workers.

        Returns:
            list of values, by worker.

        Raises:
            WorkerError: if a worker is lost, or gathers something else.
        """
        return self.begin_gather(what, value, stream)()

    def begin_gather(
        self, what: str, value: Any, stream: str = ""
    ) -> Callable[[], list[Any]]:
        """Sends a JSON value to the others; the result waits for theirs."""
        if not stream:
            self._steps_since = 0
            self._position += 1
            self._recorder.position(self._position, 0)
        with self._lead_errors():
            offered = self._client.offer(what, json.dumps(value), stream)

        def finish() -> list[Any]:
            # Waits of other threads, such as for a later batch, delay no step.
            wait = contextlib.nullcontext() if stream else self.clock.waiting()
            with wait, self._lead_errors():
                found = self._client.compared(offered, self._check_failure)
            values: list[Any] = [None] * self.count
            for text, ranks in found:
                parsed = json.loads(text)
                for rank in ranks:
                    values[rank] = parsed
            return values

        return finish

    @contextlib.contextmanager
    def _lead_errors(self) -> Iterator[None]:
        """Context of a call of the client, with errors as those of the group."""
        self.check()
        if self._client.generation is not self._generation:
            raise WorkerError("The workers form another group.")
        try:
            yield
        except WorkerError as error:
            if isinstance(error, (GroupChanged, TrainingEnded)):
                self._ended_by(error.text)
            if self.has_ended:
                text = error.text if self._loss is None else self.describe(self._loss)
                raise WorkerError(text) from error
            if error.text.startswith("Not all workers"):
                hint = self._failure or self.stall
                raise WorkerError(f"{error.text} {hint}".rstrip()) from error
            raise

    def _check_failure(self) -> None:
        if (failure := self.failure_since(FAILURE_GRACE)) is not None:
            raise WorkerError(self.describe(failure))

    @property
    def position(self) -> list[int]:
        """list of int that grows; equal where workers have made the same calls."""
        return [self._position, self._steps_since]

    def count_steps(self, count: int) -> None:
        """Counts steps that have begun, or with a negative number have not."""
        self._steps_since += count
        self._recorder.position(self._position, self._steps_since)

    @property
    def stall(self) -> str:
        """str, the report about workers that this one waits for; empty without one."""
        text, position = self._stall
        return text if position == self.position else ""

    def broadcast(self, what: str, value: Any) -> Any:
        """The chief's JSON value on every worker."""
        return self.gather_values(what, value if self.is_chief else None)[0]

    def barrier(self, what: str) -> None:
        """Waits until all workers have arrived."""
        self.gather_values(what, None)

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
        self._client.saved(os.path.basename(path), error)

    def wait_saved(self, path: str, *, again: bool = False) -> None:
        """Waits for the chief's call that corresponds to one of this worker.

        Args:
            path: str; empty for targets that are not files.
            again: bool, whether a wait for it in another generation was interrupted: a
                chief that goes on without saving has it then.

        Raises:
            WorkerError: if the chief is lost, fails, or does not make the call.
        """
        with self.clock.waiting(), self._lead_errors():
            try:
                self._client.wait_saved(os.path.basename(path), again=again)
            except WorkerError as error:
                # A chief that fails leaves without the file.
                failure, is_over = self._failure, isinstance(error, GroupChanged)
                if failure is None or failure.rank != 0 or is_over:
                    raise
                raise WorkerError(self.describe(failure)) from error

    # Stop after a common step.

    def request_stop(self) -> None:
        """Requests that all workers stop after the same step; from any thread."""
        self._client.request_stop()

    def begin_step(self) -> bool:
        """Requests permission for another step.

        After a request to stop, every worker reports how many steps it has begun and
        waits. All workers finish the furthest of these steps, and stop there.

        Returns:
            Whether the step may begin; False for all workers after the same step.

        Raises:
            WorkerError: if a worker is lost.
        """
        with self._lead_errors():
            return self._client.begin_step()

    def await_lease(self) -> None:
        """Waits until the lead has confirmed that the generation has not ended.

        Raises:
            WorkerError: if a worker is lost.
        """
        with self._lead_errors():
            self._client.await_lease()

    def resume(self) -> None:
        """Clears the request to stop, and counts steps from 0 again."""
        self._client.resume_steps()

    # Heartbeats and losses.

    @property
    def has_ended(self) -> bool:
        """bool, whether a worker is lost, or workers form another group."""
        return self._loss is not None or bool(self.end_text)

    def check(self) -> None:
        """Raises `WorkerError` if a worker is lost."""
        if self._loss is not None:
            raise WorkerError(self.describe(self._loss))
        if self.end_text:
            raise WorkerError(self.end_text)

    def describe(self, loss: Loss) -> str:
        """Message about a loss, which may be that of this worker's connection."""
        if loss.rank == self.index:
            return self._describe_end(loss.how)
        own = f" This is worker {self._number}"
        own += f", at {self.progress}." if self.progress else "."
        if loss.has_exited:
            return f"{loss}{own} {_SAME_CALLS}"
        events = ""
        if loss.host == self.own_host:
            events = runs.last_events(loss.pid)
        return (
            f"{loss}{events}{own} Training cannot continue without it. Restart all "
            "workers; with ks.callbacks.Resume they continue at their last snapshot."
        )

    def _describe_end(self, how: str) -> str:
        """Message of this worker at an end of the group without another lost worker."""
        at = f" at {self.progress}" if self.progress else ""
        return (
            f"Worker {self._number} ({self.own_host}, process {os.getpid()}) cannot go "
            f"on{at}: {how.removesuffix('.')}. Restart all workers; with "
            "ks.callbacks.Resume they continue at their last snapshot."
        )

    @property
    def times(self) -> tuple[StepTimes, ...]:
        """Times of all workers' last steps, by index.

        The chief has them from heartbeats, the others from the lead.
        """
        known: Mapping[int, Any] = self._client.times_of
        if not self.is_chief:
            with self._lead_errors():
                rows = self._client.status()["workers"]
            known = {row["rank"]: row["times"] for row in rows}
        elif known is self._times[0]:
            return self._times[1]
        times = tuple(StepTimes(*known.get(i, ())) for i in range(self.count))
        self._times = (known, times)
        return times

    def slow_workers(self) -> list[int]:
        """Indices of workers that take twice the median of the others over 20 steps."""
        return slow_workers(self.times)

    def lateness(self, index: int) -> str:
        """A sentence about the time of a worker's steps; may be empty."""
        others = (each.own for i, each in enumerate(self.times) if i != index)
        return lateness(dataclasses.astuple(self.times[index]), others)

    def loss(self, wait: float = 0.0) -> Loss | None:
        """The lost or failed worker, if it is detected within `wait` seconds."""
        until = time.monotonic() + wait
        with self._condition:
            while not self.has_ended and self._failure is None:
                left = until - time.monotonic()
                if left <= 0:
                    return None
                self._condition.wait(min(left, BEAT))
            return self._loss or self._failure

    def on_loss(self, callback: Callable[[Loss], None]) -> None:
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
        self._client.report_failure(
            text, self._open_calls[-1] if self._open_calls else 0
        )

    def failure_since(self, seconds: float) -> Loss | None:
        """A worker that left a call that is under way here, some seconds ago."""
        failure = self._failure
        if failure is None or self._failed_call not in self._open_calls:
            return None
        return failure if time.monotonic() - self._failed_at >= seconds else None

    def on_failure(self, callback: Callable[[], None]) -> None:
        """Calls `callback`, on a thread, when a worker has reported its failure."""
        self._on_failure.append(callback)

    def close(self) -> None:
        """This worker takes no part in the group any longer."""
        self._is_closed = True
        if self in _joined:
            _joined.remove(self)

    def leave(self) -> None:
        """Leaves the cluster."""
        if self._is_closed:
            return
        self.close()
        self._client.leave()
        reap(0.5)

    def _ended_by(self, how: str) -> None:
        with self._condition:
            if self._loss is None:
                self.end_text = self.end_text or how
            self._condition.notify_all()

    # What the lead tells (see `GroupListener`).

    def beat(self) -> dict[str, Any]:
        times = dataclasses.astuple(self.clock.times)
        return {"times": times, "position": [*self.position, self.clock.wait_seconds]}

    def ended(self, how: str, loss: Loss | None) -> None:
        with self._condition:
            if self.has_ended or self._is_closed:
                return
            if loss is None:
                self.end_text = self._describe_end(how)
            self._loss = loss
            self._condition.notify_all()
        if loss is None:
            place = self.own_host, os.getpid(), self.progress
            loss = Loss(self._number, self.index, *place, how)
        for callback in self._on_loss:
            callback(loss)

    def failed(self, call: int, **report: Any) -> None:
        with self._condition:
            self._failure, self._failed_at = Loss(**report), time.monotonic()
            self._failed_call = call
            self._condition.notify_all()
        for callback in self._on_failure:
            callback()

    def compared(self, **values: Any) -> None:
        # All workers arrived, so a failure that was reported before has been handled.
        # The next one may come before the answer is read.
        self._failure, self._stall = None, ("", [])

    def exited(self, loss: list[Any]) -> None:
        self.left = Loss(*loss)

    def stalled(self, text: str) -> None:
        self._stall = (text, self.position)
        if self.is_chief:
            _logger.warning("%s", text)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 300 else f"{text[:300]}..."
