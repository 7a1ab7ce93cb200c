"""Error files: the failure of a process, and whether another one has caused it.

When a worker fails, the others end with errors, too, often before it. Each process
writes its failure into the file that its launcher has named, in the format of torchrun
(`torch.distributed.elastic.multiprocessing.errors`), which reports the failure with the
earliest time as the root cause.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Environment variable of the error file, set by torchrun and by this package.
VARIABLE = "TORCHELASTIC_ERROR_FILE"
# Key of this package in the file.
_CAUSED = "is_caused_by_another"
# torchrun compares seconds: later by these, a failure that another has caused is not
# reported as the root cause.
_LATER = 2.0

_recorded: Failure | None = None


@dataclass(frozen=True)
class Failure:
    """The failure of a process.

    Args:
        text: str, the error in one line.
        traceback: str.
        time: float, seconds since the epoch.
        is_caused: bool, whether another process has failed before, and caused it.
    """

    text: str
    traceback: str
    time: float
    is_caused: bool = False

    @classmethod
    def of(cls, error: BaseException, is_caused: bool) -> Failure:
        """The failure by an error.

        Args:
            error: the exception.
            is_caused: bool, see `Failure`.
        """
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        trace = "".join(traceback.format_exception(error))
        return cls(text, trace, time.time(), is_caused)

    @classmethod
    def read(cls, file: Path) -> Failure | None:
        """The failure in an error file; None without one."""
        try:
            found: dict[str, Any] = json.loads(file.read_text())
            message = found["message"]
            more = message["extraInfo"]
            return cls(
                message["message"],
                more["py_callstack"],
                float(more["timestamp"]),
                bool(found.get(_CAUSED)),
            )
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def write(self, file: Path) -> None:
        """Replaces an error file."""
        when = self.time + (_LATER if self.is_caused else 0.0)
        extra = {"py_callstack": self.traceback, "timestamp": str(int(when))}
        message = {"message": self.text, "extraInfo": extra}
        part = file.with_name(f"{file.name}.part")
        with contextlib.suppress(OSError):
            part.write_text(json.dumps({"message": message, _CAUSED: self.is_caused}))
            os.replace(part, file)


def recorded() -> Failure | None:
    """The failure that this process has recorded last, or None."""
    return _recorded


def record(error: BaseException, is_caused: bool = False) -> Failure:
    """Records a failure of this process, unless it has another cause by now.

    Args:
        error: the exception.
        is_caused: bool, whether it follows from the failure of another process.

    Returns:
        The recorded `Failure`.
    """
    global _recorded
    failure = Failure.of(error, is_caused)
    if _recorded is not None and not _recorded.is_caused and is_caused:
        # The others have ended because of this process, which sees their end.
        return _recorded
    _recorded = failure
    if path := os.environ.get(VARIABLE):
        failure.write(Path(path))
    return failure


def forget() -> None:
    """Removes the record, when a process that has handled its error continues."""
    global _recorded
    if _recorded is None:
        return
    _recorded = None
    if path := os.environ.get(VARIABLE):
        with contextlib.suppress(OSError):
            os.remove(path)
