"""Worker entry point of `ks.launch`: unpickle the call, run it, write the outcome."""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keras_strategies.cluster.group import uncaught_errors
from keras_strategies.cluster.group.worker_group import current_group
from keras_strategies.errors import WorkerError
from keras_strategies.processes.portable_exceptions import (
    pickle_exception,
    unpickle_exception,
)

CALL = "call.pickle"


def result_file(directory: Path, index: int) -> Path:
    """The file with the outcome of a worker's call."""
    return directory / f"result-{index}.pickle"


@dataclass(frozen=True)
class CallOutcome:
    """Result or exception of a call.

    Args:
        value: its return value.
        pickled_error: bytes, the exception that it raised; empty without one, or
            where it cannot be sent.
        traceback: str, the exception's traceback; empty without one.
    """

    value: Any = None
    pickled_error: bytes = b""
    traceback: str = ""

    def error(self) -> Exception | None:
        """The exception; None if it cannot be unpickled here."""
        return unpickle_exception(self.pickled_error)

    @classmethod
    def of(cls, pickled: bytes) -> CallOutcome:
        """The outcome that `outcome_of` has pickled."""
        found: CallOutcome = pickle.loads(pickled)
        return found

    def raise_error(self, place: str) -> None:
        """Raises the exception, if there is one, with its traceback as a note.

        Args:
            place: str, such as `"worker 1"`.
        """
        if not self.traceback:
            return
        error = self.error() or WorkerError(
            f"{place} raised an error that cannot be sent to this process."
        )
        error.add_note(f"Raised in {place}:\n{self.traceback}")
        raise error

    @classmethod
    def of_error(cls, error: BaseException) -> CallOutcome:
        # Without the first entry, the call in `outcome_of`.
        trace = error.__traceback__.tb_next if error.__traceback__ else None
        text = "".join(traceback.format_exception(error.with_traceback(trace)))
        return cls(pickled_error=pickle_exception(error), traceback=text)


def outcome_of(pickled: bytes) -> tuple[bytes, bool]:
    """Runs a pickled call; its pickled outcome, and whether it has returned.

    Args:
        pickled: bytes, of a function, its arguments and its keyword arguments.
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
        return cloudpickle.dumps(CallOutcome.of_error(error)), False


def main(directory: str, index: int) -> None:
    """Runs the call as worker `index`; exits with 1 if it raised."""
    outcome, has_returned = outcome_of((Path(directory) / CALL).read_bytes())
    file = result_file(Path(directory), index)
    part = file.with_suffix(".part")
    part.write_bytes(outcome)
    os.replace(part, file)
    if not has_returned:
        sys.exit(1)
