"""Exit of processes that wait for a lost worker in their engine.

A collective waits in the engine's own code, where no exception reaches it. For a
stopped worker with open connections, it waits forever. After the loss of a
worker, the others have a few seconds to return from their collectives. A process that
does not return prints the error and exits with status 1.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator

from keras_strategies.cluster import first_causes
from keras_strategies.cluster.group.worker_group import WorkerGroup
from keras_strategies.errors import WorkerError
from keras_strategies.lead.state import Loss

#: Seconds after the loss of a worker in which the engine may return by itself.
GRACE = 5.0

_TICK = 0.05


class ExitWatchdog:
    """Watches one process of a group.

    Args:
        group: the workers.
        grace: float, seconds.
        end: ends the process, with a status.

    Example:

    >>> exit_watchdog = ExitWatchdog(group)
    >>> with exit_watchdog.waiting():
    ...     train()  # Returns, raises, or the process ends when a worker is lost.
    """

    def __init__(
        self,
        group: WorkerGroup,
        grace: float = GRACE,
        end: Callable[[int], None] = os._exit,
    ):
        self._group = group
        self._exit_grace = grace
        #: Seconds after a loss in which a wait may end.
        self.grace = grace
        self._end = end
        self._lock = threading.Lock()
        self._waits = 0
        self._loss: Loss | None = None
        group.on_loss(self._lost)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Context manager around code that may wait for other workers; reentrant."""
        with self._lock:
            self._waits += 1
        try:
            yield
        finally:
            with self._lock:
                self._waits -= 1

    def replace(self, group: WorkerGroup) -> None:
        """Watches another group; the loss in the previous one has been handled."""
        self._group, self._loss = group, None
        group.on_loss(self._lost)

    def _lost(self, loss: Loss) -> None:
        # On its own thread, since the group's thread continues to receive messages.
        self._loss = loss
        threading.Thread(
            target=self._watch, args=(loss,), name="exit-watchdog", daemon=True
        ).start()

    def _watch(self, loss: Loss) -> None:
        until = time.monotonic() + self.grace
        while time.monotonic() < until:
            time.sleep(_TICK)
            if not self._waits or self._loss is not loss:
                return
        text = (
            f"{self._group.describe(loss)}\nThis process still waits for it after "
            f"{self.grace:g} s and exits."
        )
        first_causes.record(error := WorkerError(text), is_caused=True)
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        with contextlib.suppress(OSError, ValueError):
            print(
                f"keras_strategies.errors.WorkerError: {error}",
                file=sys.stderr,
                flush=True,
            )
        self._end(1)

    def limit_exit(self) -> None:
        """Limits the exit of a process that has lost a worker.

        The engine's threads may wait in a collective, and the exiting interpreter waits
        for them. Python code no longer runs at that point, so `faulthandler` ends the
        process.
        """
        if self._loss is not None:
            # Open until the timeout, when the traceback is written.
            self._nowhere = open(os.devnull, "w")  # noqa: SIM115
            faulthandler.dump_traceback_later(
                self._exit_grace, exit=True, file=self._nowhere
            )
