"""`ks.launch`: a function on several workers, from a notebook or a script."""

from __future__ import annotations

import os
import queue
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from keras_strategies.errors import InvalidArgumentError, WorkerError
from keras_strategies.processes.function_command import function_command
from keras_strategies.processes.keras_import import own_backend
from keras_strategies.processes.launched_call import (
    CALL,
    CallOutcome,
    pickled_call,
    result_file,
)
from keras_strategies.processes.launched_lead import launched_lead
from keras_strategies.processes.launcher import Ended, Events, ProcessLauncher
from keras_strategies.processes.local_cluster import LocalCluster, LocalTask
from keras_strategies.types import check_seconds

_ENTRY = "keras_strategies.processes.launched_call:main"
_GRACE_SECONDS = 10.0


def launch(
    function: Callable[..., Any],
    workers: int = 2,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    devices_per_worker: int | None = None,
    *,
    timeout_seconds: float | None = None,
) -> list[Any]:
    """Calls a function on several worker processes on this machine.

    As under `keras-strategies launch`, the variable `TF_CONFIG` describes the cluster
    and the task of each process for `ks.MultiWorkerMirroredStrategy()` in the function.
    Lines of output have the prefix `[worker 1]`. The function, its arguments and its
    results are sent by cloudpickle, so it may be defined in a notebook; import modules
    inside of it. All processes have ended when `launch` returns.

    Args:
        function: callable, called once in each process.
        workers: int, number of processes, 1 or more.
        args: sequence of arguments for each call.
        kwargs: dict of keyword arguments for each call.
        devices_per_worker: int, GPUs for each worker, or virtual CPU devices where
            there are no GPUs. By default the GPUs are shared equally.
        timeout_seconds: float, seconds after which the processes are ended; None to
            wait as long as it takes.

    Returns:
        list of the workers' results, in their order.

    Raises:
        Exception: the error of the function on the worker that failed first, with the
            traceback of that process as a note.
        RuntimeError: as `ks.errors.WorkerError`, if a worker died, or did not return
            in time.
        ValueError: for invalid numbers, or if `function` is not callable.

    Example:

    >>> def train():
    ...     import keras, keras_strategies as ks
    ...     strategy = ks.MultiWorkerMirroredStrategy()
    ...     with strategy.scope():
    ...         model = ...
    ...     return model.fit(x, y).history
    >>> histories = ks.launch(train, workers=2)
    """
    if not callable(function):
        raise InvalidArgumentError(
            "`function` of `launch` must be callable. Received: "
            f"{function!r}. To start a script, use `keras-strategies launch`."
        )
    if timeout_seconds is not None:
        check_seconds("timeout_seconds", timeout_seconds, ", or None")
    cluster = LocalCluster(workers, devices_per_worker=devices_per_worker)
    with tempfile.TemporaryDirectory(prefix="keras-strategies-") as name:
        directory = Path(name)
        (directory / CALL).write_bytes(pickled_call(function, args, kwargs))
        _run(cluster, directory, timeout_seconds)
        return [
            CallOutcome.of(result_file(directory, i).read_bytes()).value
            for i in range(workers)
        ]


def _run(cluster: LocalCluster, directory: Path, timeout: float | None) -> None:
    events: Events = queue.SimpleQueue()
    waiting = set(cluster.tasks)
    deadline = None if timeout is None else time.monotonic() + timeout
    outer = {**os.environ, **own_backend()}
    with (
        launched_lead(cluster.environments(outer)) as environments,
        ProcessLauncher(events, _GRACE_SECONDS) as processes,
    ):
        for task, environment in environments.items():
            arguments = {"directory": str(directory), "index": task.index}
            command = function_command(_ENTRY, arguments)
            processes.start(task, command, environment)
        while waiting:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            event = processes.next_event(left)
            if event is None:
                raise WorkerError(
                    f"{_names(waiting)} had not returned after {timeout:g} seconds "
                    "(`timeout_seconds`), and all workers were ended. See their last "
                    "output, or raise `timeout_seconds`."
                )
            if isinstance(event, Ended):
                _check(processes.first_failure(event), directory)
                waiting.discard(event.task)


def _names(tasks: set[LocalTask]) -> str:
    return ", ".join(f"worker {i}" for i in sorted(task.index for task in tasks))


def _check(event: Ended, directory: Path) -> None:
    """Raises the error that ended a worker, unless it has returned."""
    file = result_file(directory, event.task.index)
    outcome = CallOutcome.of(file.read_bytes()) if file.exists() else None
    if outcome is not None:
        outcome.raise_error()
    if event.code or outcome is None:
        when = "before" if outcome is None else "after"
        raise WorkerError(
            f"{event} {when} the function had returned, and all workers were ended."
            f"{event.events} Its last output may show why; SIGKILL often means that "
            "the machine ran out of memory."
        )
