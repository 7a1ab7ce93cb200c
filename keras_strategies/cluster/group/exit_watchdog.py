"""Ends a process whose engine keeps waiting for a worker that is lost.

A collective waits in the engine's own code, where no exception reaches it: for a
worker that was stopped, whose connections are still open, it waits forever. So once a
worker is lost, the others have a few seconds to come back from what they are in. Who
does not, is ended: the error is printed, and the process exits with status 1.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator

from keras_strategies.cluster.group.worker_group import Loss, WorkerGroup
from keras_strategies.errors import WorkerError

#: Seconds from the loss of a worker, in which the engine may come back by itself.
GRACE = 5.0

_TICK = 0.05


def _exit() -> None:
    os._exit(1)


class ExitWatchdog:
    """Watches one process of a group.

    Args:
        group: the workers.
        grace: float, seconds.
        end: ends the process.

    Example:

    >>> exit_watchdog = ExitWatchdog(group)
    >>> with exit_watchdog.waiting():
    ...     train()  # Returns, raises, or the process ends when a worker is lost.
    """

    def __init__(
        self,
        group: WorkerGroup,
        grace: float = GRACE,
        end: Callable[[], None] = _exit,
    ):
        self._group = group
        self._grace = grace
        self._end = end
        self._lock = threading.Lock()
        self._waits = 0
        self._loss: Loss | None = None
        group.on_loss(self._lost)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Entered around what may wait for other workers; also inside of itself."""
        with self._lock:
            self._waits += 1
        try:
            yield
        finally:
            with self._lock:
                self._waits -= 1

    def _lost(self, loss: Loss) -> None:
        # The group's thread goes on: it has to hear of the others.
        self._loss = loss
        threading.Thread(
            target=self._watch, args=(loss,), name="last-resort", daemon=True
        ).start()

    def _watch(self, loss: Loss) -> None:
        until = time.monotonic() + self._grace
        while time.monotonic() < until:
            time.sleep(_TICK)
            if not self._waits:
                return
        text = (
            f"{self._group.describe(loss)}\nThis process still waits for it after "
            f"{self._grace:g} s and exits."
        )
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        with contextlib.suppress(OSError, ValueError):
            print(
                f"keras_strategies.errors.WorkerError: {WorkerError(text)}",
                file=sys.stderr,
                flush=True,
            )
        self._end()

    def limit_exit(self) -> None:
        """At the end of a process that has lost a worker: does not let it hang.

        The engine's threads may wait in a collective, and the interpreter, which is
        ending, for them. Python code no longer runs then, so this is `faulthandler`'s.
        """
        if self._loss is not None:
            # Kept open: it is written to when the time is over.
            self._nowhere = open(os.devnull, "w")  # noqa: SIM115
            faulthandler.dump_traceback_later(
                self._grace, exit=True, file=self._nowhere
            )
