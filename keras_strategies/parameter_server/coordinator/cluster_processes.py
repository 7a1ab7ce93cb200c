"""Processes of a cluster: start, kill and exit reports."""

from __future__ import annotations

import abc
import contextlib
import queue
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from keras_strategies.cluster.environment import KEPT_MEMORY, QUIET
from keras_strategies.processes.function_command import function_command
from keras_strategies.processes.launcher import Ended, Events, ProcessLauncher
from keras_strategies.processes.local_cluster import GPUS, LocalTask

_ENTRY = "keras_strategies.processes.keras_import:call_with_keras"
#: For processes with a common GPU: JAX and TensorFlow take its memory as needed.
SHARED_GPU = {
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    "TF_FORCE_GPU_ALLOW_GROWTH": "true",
}
# Processes have nothing to save when the cluster ends.
_GRACE_SECONDS = 1.0


@dataclass(frozen=True)
class ProcessCall:
    """The function that a process calls.

    Args:
        entry: str, `"module:function"`.
        arguments: dict for the function, of numbers, strings and lists.
        environment: dict, environment variables of this process alone.
    """

    entry: str
    arguments: dict[str, Any]
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class EndCause:
    """Why a process has ended.

    Args:
        reason: str, for messages.
        is_from_outside: bool, whether it may have been ended from outside: by a signal,
            or with its machine. Otherwise by its code: an exit code, or a fault such as
            SIGSEGV.
    """

    reason: str
    is_from_outside: bool


class TaskProcesses(abc.ABC):
    """Processes of workers and parameter servers, ended by `close`.

    One thread makes all calls of `start`, and the processes end with that thread.
    """

    @abc.abstractmethod
    def start(self, task: LocalTask) -> None:
        """Starts a process; its kind is `"worker"` or `"ps"`."""

    @abc.abstractmethod
    def kill(self, task: LocalTask) -> None:
        """Kills a process, also if it is stopped."""

    @abc.abstractmethod
    def ended(self) -> Iterator[tuple[LocalTask, EndCause]]:
        """The processes that have ended since the last call, and the causes."""

    @abc.abstractmethod
    def close(self) -> None:
        """Ends all processes and waits for them."""


class ClusterProcesses(TaskProcesses):
    """Workers and parameter servers on this machine.

    The processes also end if this one is killed.

    Args:
        call_of: callable of a task that returns its `ProcessCall`.
        environment: dict, environment variables of the processes.
    """

    def __init__(
        self,
        call_of: Callable[[LocalTask], ProcessCall],
        environment: Mapping[str, str],
    ):
        self._call_of = call_of
        self._environment = environment
        self._open = contextlib.ExitStack()
        events: Events = queue.SimpleQueue()
        self._launcher = self._open.enter_context(
            ProcessLauncher(events, _GRACE_SECONDS)
        )

    def start(self, task: LocalTask) -> None:
        call = self._call_of(task)
        arguments = {"entry": call.entry, "arguments": call.arguments}
        command = function_command(_ENTRY, arguments)
        self._launcher.start(task, command, {**self._environment, **call.environment})

    def kill(self, task: LocalTask) -> None:
        self._launcher.kill(task)

    def ended(self) -> Iterator[tuple[LocalTask, EndCause]]:
        while (event := self._launcher.next_event(0.0)) is not None:
            if isinstance(event, Ended):
                is_error = event.code > 0 and event.last_error
                reason = event.last_error if is_error else f"it {event.how}"
                yield event.task, EndCause(reason, event.is_from_outside)

    def close(self) -> None:
        self._open.close()


def gpu_environment(task: LocalTask, gpus: Sequence[str]) -> dict[str, str]:
    """Environment variables that give each worker of this machine one of its GPUs.

    Args:
        task: the task; servers see no GPU.
        gpus: list of str, the GPUs that are visible here.
    """
    if not gpus:
        return {}
    return {GPUS: gpus[task.index % len(gpus)] if task.job == "worker" else ""}


def environment(threads: int, outer: Mapping[str, str]) -> dict[str, str]:
    """Environment variables of a cluster's processes.

    Args:
        threads: int, threads of each process.
        outer: the inherited environment, which is extended.
    """
    import keras

    found = {
        **QUIET,
        **KEPT_MEMORY,
        **outer,
        "KERAS_BACKEND": keras.backend.backend(),
        "PYTHONUNBUFFERED": "1",
    }
    found.setdefault("OMP_NUM_THREADS", str(threads))
    # Threads of XLA on CPUs, and of TensorFlow.
    for name in ("NPROC", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"):
        found.setdefault(name, str(threads))
    found.pop("TF_CONFIG", None)
    return found
