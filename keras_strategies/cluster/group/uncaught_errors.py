"""Errors that end the script of a worker: recorded for its launcher."""

from __future__ import annotations

import os
import sys
import time

from keras_strategies.cluster import first_causes
from keras_strategies.cluster.group.worker_group import WorkerGroup
from keras_strategies.lead.state import Loss

# Seconds for which a worker waits for the end of the one whose failure ends it too, so
# that a launcher sees the first one, with its exit code, first.
_FIRST_END_SECONDS = 5.0
_TICK = 0.05


def record(group: WorkerGroup, error: BaseException) -> None:
    """Records an error of this worker, with or without the failure of another before.

    Args:
        group: the connected workers.
        error: the exception.
    """
    first_causes.record(error, is_caused=_cause(group) is not None)


def report(group: WorkerGroup, error: BaseException) -> None:
    """Records an error by which this worker leaves a call, and tells the others."""
    record(group, error)
    group.report(error)


def _cause(group: WorkerGroup) -> Loss | None:
    """The other worker that has failed and ends, if there is one."""
    loss = group.loss()
    if loss is None or loss.rank == group.index or loss.is_silent:
        return None
    return loss


def at_exit(group: WorkerGroup) -> None:
    """Records the error that has ended the script, if one has; for `atexit`.

    Args:
        group: the connected workers, before this one leaves.
    """
    # Of the interpreter, when it has printed an error that was not handled.
    error = getattr(sys, "last_value", None)
    if error is None or isinstance(error, KeyboardInterrupt):
        return
    cause = _cause(group)
    if cause is None and first_causes.recorded() is None:
        # Outside of the calls that report their errors.
        group.report(error)
    # Again, for the complete traceback.
    record(group, error)
    failure = first_causes.recorded()
    if failure is not None and failure.is_caused and cause is not None:
        _wait_for_end(group, cause)


def _wait_for_end(group: WorkerGroup, cause: Loss) -> None:
    """Waits for the end of a process on this machine that has failed first."""
    is_watched = first_causes.VARIABLE in os.environ
    if not is_watched or cause.host != group.own_host:
        return
    until = time.monotonic() + _FIRST_END_SECONDS
    while time.monotonic() < until and _exists(cause.pid):
        time.sleep(_TICK)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError as error:
        return isinstance(error, PermissionError)
    return True
