"""`ks.launch`: a function on several worker processes, from a notebook or a script."""

from __future__ import annotations

import argparse
import pickle
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from keras_strategies.cli.launch import cluster_tasks
from keras_strategies.cli.processes import run_together
from keras_strategies.errors import InvalidArgumentError, WorkerError


def launch(
    function: Callable[..., Any],
    workers: int = 2,
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
    devices_per_worker: int | None = None,
) -> list[Any]:
    """Runs a function on worker processes of this machine.

    Each process has a `TF_CONFIG` that says which worker it is, as
    `keras-strategies launch` gives it to scripts. What they print appears here with
    the worker's name before it. None of them is left when this returns or raises.

    Args:
        function: callable; may be defined in a notebook.
        workers: int, how many processes.
        args: sequence, positional arguments for each of them.
        kwargs: dict, keyword arguments.
        devices_per_worker: int, virtual CPU devices of each process, where there are
            no accelerators; None for one.

    Returns:
        list of what the function returned on each worker, in their order.

    Raises:
        ImportError: without the package `cloudpickle`.
        RuntimeError: as `ks.errors.WorkerError`, if a process ended without a result.
        Exception: what the function raised on the first worker that failed, with the
            traceback of that process as a note.

    Example:

    >>> def who():
    ...     return ks.cluster_resolver.TFConfigClusterResolver().task_id
    >>> ks.launch(who, workers=3)
    [0, 1, 2]
    """
    if not callable(function):
        raise InvalidArgumentError(
            f"`launch` runs a function on each worker. Received: {function!r}."
        )
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
        raise InvalidArgumentError(
            f"`workers` is a number of processes, 1 or more. Received: {workers!r}."
        )
    with tempfile.TemporaryDirectory(prefix="keras_strategies_") as folder:
        call = Path(folder) / "call"
        call.write_bytes(cloudpickle().dumps((function, tuple(args), kwargs or {})))
        options = argparse.Namespace(
            workers=workers,
            ps=0,
            chief=False,
            evaluator=False,
            devices_per_worker=devices_per_worker,
        )
        command = [sys.executable, "-u", "-m", "keras_strategies.cli.worker", folder]
        ended = run_together(cluster_tasks(options, command), _Printed())
        if ended.code:
            _raise_error_of(ended.task, ended.code, Path(folder))
        return [
            pickle.loads((Path(folder) / f"worker {i}").read_bytes())[1]
            for i in range(workers)
        ]


def cloudpickle() -> Any:
    """The package that pickles functions of notebooks, with an error without it."""
    try:
        import cloudpickle
    except ImportError:
        raise ImportError(
            "`ks.launch` needs the package `cloudpickle` to send functions to other "
            "processes: `pip install cloudpickle`."
        ) from None
    return cloudpickle


class _Printed:
    """A binary stream that prints, also where standard output has no bytes."""

    def write(self, data: bytes) -> int:
        print(data.decode(errors="replace"), end="")
        return len(data)

    def flush(self) -> None:
        sys.stdout.flush()


def _raise_error_of(task: str, code: int, folder: Path) -> None:
    path = folder / task
    if not path.exists():
        raise WorkerError(
            f"{task} ended with exit code {code} and without a result. Its last lines "
            "of output, printed above, may say why."
        )
    _, error, text = pickle.loads(path.read_bytes())
    error.add_note(f"Raised in {task}:\n{text}")
    raise error
