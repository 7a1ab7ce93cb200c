"""Runs of a function on synchronous workers: addresses, results, restarts."""

from __future__ import annotations

import dataclasses
import json
import secrets
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from keras_strategies.cluster.environment import ELASTIC, QUIET, RUN_ID
from keras_strategies.cluster.resolvers.environment import tf_config
from keras_strategies.cluster.startup_report import Progress
from keras_strategies.errors import ReplicaError, WorkerError
from keras_strategies.processes.keras_import import own_backend
from keras_strategies.processes.launched_call import CallOutcome
from keras_strategies.processes.launched_lead import LaunchedLead
from keras_strategies.processes.local_cluster import LocalTask
from keras_strategies.processes.ray.actors import Reply, TaskActors
from keras_strategies.processes.ray.connection import node_host
from keras_strategies.processes.ray.task_placement import ClusterPlan, Reservation
from keras_strategies.types import Elastic

#: Name of the engine in `TF_CONFIG`.
ENGINE = "ray"
# Seconds to wait for the error that has caused another: workers report a lost worker
# before Ray does.
_CAUSE_SECONDS = 5.0
#: Starts of a worker without a call of its function after which the run fails.
_MAX_STARTS = 4


@dataclass(frozen=True)
class RunSettings:
    """Settings of a run.

    Args:
        pickled: bytes, the call, see `launched_call.pickled_call`.
        max_restarts: int, number of restarts of all workers; with `elastic`, of
            workers that are replaced.
        elastic: `Elastic` or None.
        timeout_seconds: float or None, time for the run.
    """

    pickled: bytes
    max_restarts: int = 0
    elastic: Elastic | None = None
    timeout_seconds: float | None = None


def run_workers(plan: ClusterPlan, settings: RunSettings) -> list[Any]:
    """Calls the function on each worker; the results, by worker.

    Raises:
        Exception: as `RayClusterResolver.run`.
    """
    tasks = tuple(LocalTask("worker", i) for i in range(plan.workers))
    progress = Progress()
    limit = settings.timeout_seconds
    deadline = None if limit is None else time.monotonic() + limit
    environment = {**QUIET, **own_backend()}
    with Reservation(plan, tasks) as reservation:
        for restarts in range(settings.max_restarts + 1):
            with TaskActors(plan, reservation, environment) as actors:
                run = _Run(settings, actors, deadline)
                try:
                    return run.results(tasks)
                except Exception as error:
                    is_last = restarts == settings.max_restarts
                    if is_last or run.is_over or settings.elastic is not None:
                        raise
                    progress.report(
                        f"{_first_line(error)} All workers are started again, restart "
                        f"{restarts + 1} of {settings.max_restarts}"
                    )
    raise AssertionError("The last restart returns or raises.")


def _first_line(error: Exception) -> str:
    text = f"{type(error).__name__}: {error}".splitlines()[0]
    return text if text.endswith(".") else f"{text}."


@dataclass
class _Run:
    """One start of all workers; lost elastic workers are replaced.

    Args:
        settings: `RunSettings`.
        actors: `TaskActors`.
        deadline: float, of `time.monotonic`, or None.
    """

    settings: RunSettings
    actors: TaskActors
    deadline: float | None
    #: Whether no time is left for a restart.
    is_over: bool = False
    _name: str = field(default_factory=secrets.token_hex)
    _addresses: dict[int, str] = field(default_factory=dict)
    #: The latest process of each worker.
    _current: dict[int, LocalTask] = field(default_factory=dict)
    _running: set[int] = field(default_factory=set)
    _outcomes: dict[int, CallOutcome] = field(default_factory=dict)
    _replaced: int = 0
    _lead: LaunchedLead | None = None
    #: Processes of each worker that were started since its function ran.
    _starts: Counter[int] = field(default_factory=Counter)

    def results(self, tasks: tuple[LocalTask, ...]) -> list[Any]:
        """Starts the workers and waits for their results."""
        for task in tasks:
            self._start(task)
        while len(self._addresses) < len(tasks):
            self._handle_address(self._next())
        addresses = [self._addresses[task.index] for task in tasks]
        # Workers are lost with their nodes; this process is needed anyway.
        with LaunchedLead(addresses, secrets.token_hex(), node_host()) as lead:
            self._lead = lead
            for task in list(self._current.values()):
                self._call(task)
            # Replacements that start after all others have returned are not needed.
            while self._running or not self._outcomes:
                self._handle(self._next())
        return [
            self._outcomes[i].value if i in self._outcomes else None
            for i in range(len(tasks))
        ]

    def _start(self, task: LocalTask) -> None:
        self._current[task.index] = task
        self._starts[task.index] += 1
        self.actors.start(task)
        self.actors.call(task, "address")

    def _call(self, task: LocalTask) -> None:
        cluster = {"worker": [self._addresses[i] for i in sorted(self._addresses)]}
        position = {"type": task.job, "index": task.index}
        config = {"cluster": cluster, "task": position, "environment": ENGINE}
        environment = {tf_config.VARIABLE: json.dumps(config), RUN_ID: self._name}
        assert self._lead is not None
        # A replaced worker 0 has another address.
        environment |= self._lead.variables(self._addresses[0])
        if (elastic := self.settings.elastic) is not None:
            most = elastic.max_workers or len(self._addresses)
            environment[ELASTIC] = f"{elastic.min_workers}:{most}"
        self.actors.call(task, "call", self.settings.pickled, environment)
        self._running.add(task.index)

    def _next(self) -> Reply:
        """The next reply of a current process.

        Raises:
            WorkerError: after `timeout_seconds`.
        """
        while True:
            left = None
            if self.deadline is not None:
                left = max(0.0, self.deadline - time.monotonic())
            reply = self.actors.next_reply(left)
            if reply is None:
                self.is_over = True
                missing = sorted(self._current.keys() - self._outcomes.keys())
                raise WorkerError(
                    f"{', '.join(f'worker {i}' for i in missing)} had not returned "
                    f"after {self.settings.timeout_seconds:g} seconds "
                    "(`timeout_seconds`), and all workers were ended. See their last "
                    "output, or raise `timeout_seconds`."
                )
            if self._current.get(reply.task.index) == reply.task:
                return reply

    def _handle_address(self, reply: Reply) -> None:
        task = reply.task
        if not reply.lost:
            self._addresses[task.index] = reply.value
        elif self._starts[task.index] < _MAX_STARTS:
            # For example on a node that was lost before Ray detected it.
            self.actors.kill(task)
            self._start(dataclasses.replace(task, incarnation=task.incarnation + 1))
        else:
            raise _lost(reply)

    def _handle(self, reply: Reply) -> None:
        task = reply.task
        if reply.method == "address":
            self._handle_address(reply)
            if not reply.lost:
                self._call(task)
            return
        self._running.discard(task.index)
        self._starts[task.index] = 0
        outcome = None if reply.lost else CallOutcome.of(reply.value)
        if outcome is not None and outcome.error is None:
            self._outcomes[task.index] = outcome
        elif not self._is_elastic(outcome):
            self._fail(reply, outcome)
        elif not self._outcomes:
            self._replace(reply, outcome)

    def _is_elastic(self, outcome: CallOutcome | None) -> bool:
        """Whether the others continue without the worker."""
        if self.settings.elastic is None:
            return False
        return outcome is None or _follows_another(outcome)

    def _replace(self, reply: Reply, outcome: CallOutcome | None) -> None:
        task = reply.task
        if self._replaced == self.settings.max_restarts:
            if not self._running:
                self._fail(reply, outcome)
            return
        self._replaced += 1
        self.actors.kill(task)
        Progress().report(
            f"{task} was lost, and another process joins the others as soon as there "
            f"is room for it, restart {self._replaced} of {self.settings.max_restarts}"
        )
        self._start(LocalTask(task.job, task.index, task.incarnation + 1))

    def _fail(self, reply: Reply, outcome: CallOutcome | None) -> None:
        """Raises the error of the worker that failed, not one that followed it."""
        until = time.monotonic() + _CAUSE_SECONDS
        while outcome is not None and _follows_another(outcome):
            other = self.actors.next_reply(max(0.0, until - time.monotonic()))
            if other is None:
                break
            if other.lost:
                reply, outcome = other, None
                break
            later = CallOutcome.of(other.value)
            if later.error is not None and not _follows_another(later):
                reply, outcome = other, later
        if outcome is None:
            raise _lost(reply)
        outcome.raise_error()


def _follows_another(outcome: CallOutcome) -> bool:
    """Whether the failure of another worker has ended a call."""
    return outcome.error is not None and isinstance(outcome.error.error(), ReplicaError)


def _lost(reply: Reply) -> WorkerError:
    return WorkerError(
        f"{reply.task} was lost before the function had returned, and all workers were "
        f"ended. {reply.lost}"
    )
