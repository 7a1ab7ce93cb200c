"""Worker entry point of `ks.launch`: unpickle the call, run it, write the outcome."""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keras_strategies.cluster.group import uncaught_errors
from keras_strategies.cluster.group.worker_group import current_group
from keras_strategies.errors import WorkerError
from keras_strategies.processes.portable_exceptions import PortableException

CALL = "call.pickle"


def result_file(directory: Path, index: int) -> Path:
    """The file with the outcome of a worker's call."""
    return directory / f"result-{index}.pickle"


@dataclass(frozen=True)
class CallOutcome:
    """Result or exception of a call.

    Args:
        value: its return value.
        error: `PortableException`, the exception that it raised; None without one.
    """

    value: Any = None
    error: PortableException | None = None

    @classmethod
    def of(cls, pickled: bytes) -> CallOutcome:
        """The outcome that `outcome_of` has pickled."""
        found: CallOutcome = pickle.loads(pickled)
        return found

    def raise_error(self) -> None:
        """Raises the exception, if there is one, with its traceback as a note."""
        if self.error is not None:
            raise self.error.error(WorkerError)


def pickled_call(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
) -> bytes:
    """A call, pickled for `outcome_of`.

    Raises:
        WorkerError: if it cannot be pickled.
    """
    import cloudpickle

    try:
        pickled: bytes = cloudpickle.dumps((function, tuple(args), dict(kwargs or {})))
    except Exception as error:
        raise WorkerError(
            "The function or its arguments cannot be pickled for the workers: "
            f"{error}. Create objects such as locks and files inside of the function."
        ) from error
    return pickled


def outcome_of(pickled: bytes, task: str) -> tuple[bytes, bool]:
    """Runs a pickled call; its pickled outcome, and whether it has returned.

    Args:
        pickled: bytes, of a function, its arguments and its keyword arguments.
        task: str, this process in errors, such as `"worker 1"`.
    """
    import cloudpickle

    try:
        function, args, kwargs = pickle.loads(pickled)
        value = function(*args, **kwargs)
        try:
            return cloudpickle.dumps(CallOutcome(value)), True
        except Exception as error:
            raise WorkerError(
                f"The function returned a {type(value).__name__}, which cannot be sent "
                f"to another process: {error}"
            ) from error
    except BaseException as error:
        traceback.print_exc()
        if (group := current_group()) is not None:
            uncaught_errors.record(group, error)
        # Without the first entry of the traceback, the call here.
        trace = error.__traceback__.tb_next if error.__traceback__ else None
        found = PortableException.of(error.with_traceback(trace), f"in {task}")
        return cloudpickle.dumps(CallOutcome(error=found)), False


def main(directory: str, index: int) -> None:
    """Runs the call as worker `index`; exits with 1 if it raised."""
    pickled = (Path(directory) / CALL).read_bytes()
    outcome, has_returned = outcome_of(pickled, f"worker {index}")
    file = result_file(Path(directory), index)
    part = file.with_suffix(".part")
    part.write_bytes(outcome)
    os.replace(part, file)
    if not has_returned:
        sys.exit(1)
