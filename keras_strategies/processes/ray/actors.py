"""Actors of Ray: one process for each task."""

from __future__ import annotations

import os
import queue
import socket
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from keras_strategies.processes.keras_import import call_with_keras
from keras_strategies.processes.launched_call import outcome_of
from keras_strategies.processes.local_cluster import GPUS, LocalTask
from keras_strategies.processes.ray.connection import import_ray, node_address
from keras_strategies.processes.ray.task_placement import ClusterPlan, Reservation


class TaskProcess:
    """A task's process: the class of the actors.

    Args:
        name: str, the task's name, which Ray writes in front of its output.
    """

    def __init__(self, name: str):
        self._name = name
        self._reserved: socket.socket | None = None

    def __repr__(self) -> str:
        return self._name

    def address(self) -> str:
        """str, an address on this node; its port is reserved until `call`."""
        family = socket.AF_INET6 if ":" in node_address(0)[:-2] else socket.AF_INET
        self._reserved = socket.socket(family)
        self._reserved.bind(("", 0))
        return node_address(self._reserved.getsockname()[1])

    def call(self, pickled: bytes, environment: Mapping[str, str]) -> bytes:
        """Calls a pickled function; returns its pickled outcome."""
        os.environ.update(environment)
        if self._reserved is not None:
            self._reserved.close()
        return outcome_of(pickled, self._name)[0]

    def serve(self, entry: str, arguments: dict[str, Any]) -> None:
        """Calls a function of this package, which serves until the cluster ends.

        Args:
            entry: str, `"module:function"`.
            arguments: dict of its arguments; an `address` without a host becomes one
                of this node.
        """
        if arguments.get("address") == "":
            arguments = {**arguments, "address": f"tcp://{node_address(0)}"}
        call_with_keras(entry, arguments)


@dataclass(frozen=True)
class Reply:
    """The end of a call of an actor.

    Args:
        task: the actor's task.
        method: str, the method.
        value: its return value.
        lost: str, the reason if the process has ended instead; `""` otherwise.
    """

    task: LocalTask
    method: str
    value: Any = None
    lost: str = ""


class TaskActors:
    """The running actors of a cluster; leaving the context ends them.

    Args:
        plan: `ClusterPlan`.
        reservation: `Reservation` of their resources.
        environment: dict, environment variables of their processes.
    """

    def __init__(
        self,
        plan: ClusterPlan,
        reservation: Reservation,
        environment: Mapping[str, str],
    ):
        self._ray = import_ray()
        self._plan = plan
        self._reservation = reservation
        self._environment = environment
        self._running: dict[LocalTask, Any] = {}
        self.replies: queue.SimpleQueue[Reply] = queue.SimpleQueue()

    def __enter__(self) -> TaskActors:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def start(self, task: LocalTask) -> None:
        """Starts a task's process, as soon as its resources are free.

        A process that has ended is replaced by another actor, with the next
        incarnation: Ray's own restarts cannot be distinguished from the first start.
        """
        given = dict(self._plan.runtime_env)
        variables = {**self._environment, **given.pop("env_vars", {})}
        if not self._plan.resources[task.job].get("GPU"):
            variables.setdefault(GPUS, "")
        actor = self._ray.remote(TaskProcess).options(
            **self._plan.options(task),
            runtime_env={**given, "env_vars": variables},
            scheduling_strategy=self._reservation.scheduling(task),
            max_restarts=0,
        )
        self._running[task] = actor.remote(str(task))

    def call(self, task: LocalTask, method: str, *arguments: Any) -> None:
        """Calls a method of a task's actor; the reply is put into `replies`."""
        reference = getattr(self._running[task], method).remote(*arguments)

        def done(future: Future[Any]) -> None:
            error = future.exception()
            if error is None:
                reply = Reply(task, method, future.result())
            else:
                reply = Reply(task, method, lost=_reason(error))
            self.replies.put(reply)

        reference.future().add_done_callback(done)

    def next_reply(self, timeout: float | None = None) -> Reply | None:
        """Waits for the next reply; None after `timeout` seconds without one."""
        try:
            return self.replies.get(timeout=timeout)
        except queue.Empty:
            return None

    def kill(self, task: LocalTask) -> None:
        """Kills a task's process."""
        actor = self._running.pop(task, None)
        if actor is not None and self._ray.is_initialized():
            self._ray.kill(actor)

    def close(self) -> None:
        """Kills all processes."""
        for task in list(self._running):
            self.kill(task)


def _reason(error: BaseException) -> str:
    """The reason for the end of an actor, without Ray's table of numbers."""
    text = str(error).strip()
    if text.startswith("\x1b") or "Traceback (most" in text or "ray::" in text:
        return text.splitlines()[-1]  # The traceback of an exception of the method.
    # "The actor died ...\n\tclass_name: A\n\tactor_id: ...\nThe actor died because its
    # node has died. Node Id: 9e18\n\tthe actor's node was terminated unexpectedly: ..."
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    facts = [line for line in lines[1:] if not _is_number(line)] or lines[:1]
    return " ".join(facts).partition(" Some common causes include")[0]


def _is_number(line: str) -> bool:
    return line.split(":")[0] in ("class_name", "actor_id", "pid", "namespace", "ip")
