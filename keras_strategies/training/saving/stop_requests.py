"""Signals that end training after a step, on which all workers agree."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn, Protocol

from keras_strategies.cluster.group import WorkerGroup

#: Exit code of a worker that stops because another one has received a signal.
_STOPPED_EXIT_CODE = 128 + signal.SIGTERM


class Steps(Protocol):
    """Steps with a common end (see `WorkerGroup`)."""

    def resume(self) -> None: ...

    def request_stop(self) -> None: ...

    def begin_step(self) -> bool: ...


class LocalSteps:
    """The steps of a process that trains alone."""

    def __init__(self) -> None:
        self._is_stopping = False

    def resume(self) -> None:
        self._is_stopping = False

    def request_stop(self) -> None:
        self._is_stopping = True

    def begin_step(self) -> bool:
        return not self._is_stopping


class StopRequests:
    """Handles signals by a request to stop, until it is closed.

    A second Ctrl-C ends the process at once.

    Args:
        group: the workers, which stop together; None for this process alone.
        numbers: the signals.
        grace_seconds: float, seconds between a signal and the request.
        is_current: callable of the frame that a signal interrupts: whether the code
            that asks `begin_step` is under way. Otherwise the earlier handlers take
            over again: an error may have left it.
    """

    def __init__(
        self,
        group: WorkerGroup | None,
        numbers: tuple[int, ...],
        grace_seconds: float = 0.0,
        is_current: Callable[[Any], bool] = lambda frame: True,
    ):
        self.steps: Steps = group or LocalSteps()
        #: The signal that was received last; None for none.
        self.received: int | None = None
        self._numbers = numbers
        self._grace_seconds = grace_seconds
        self._is_current = is_current
        self._previous: dict[int, Any] = {}

    def watch(self) -> None:
        """Begins to handle signals; nothing outside of the main thread.

        Signals that are ignored, as Ctrl-C in the background, stay so.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        for number in self._numbers:
            previous = signal.getsignal(number)
            if previous not in (None, signal.SIG_IGN):
                self._previous[number] = previous
                signal.signal(number, self._receive)

    def close(self) -> None:
        """Restores the earlier handlers."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number, previous in self._previous.items():
            # Another one may have been installed since.
            if signal.getsignal(number) == self._receive:
                signal.signal(number, previous)
        self._previous = {}

    def begin_step(self) -> bool:
        """Whether another step may begin; False on all workers after the same step."""
        return self.steps.begin_step()

    def request(self) -> None:
        """Asks all workers to stop, after the grace period; from any thread."""
        # On a thread, since a signal may interrupt a message.
        timer = threading.Timer(self._grace_seconds, self.steps.request_stop)
        timer.daemon = True
        timer.start()

    def end(self) -> NoReturn:
        """Ends the process as the signal would have: with the earlier handler."""
        number, previous = self.received, None
        if number is not None:
            previous = self._previous.get(number)
        self.close()
        if number is None:
            sys.exit(_STOPPED_EXIT_CODE)
        if callable(previous):
            previous(number, None)  # That of Python raises `KeyboardInterrupt`.
        sys.exit(128 + number)

    def _receive(self, number: int, frame: Any) -> None:
        is_second = number == signal.SIGINT == self.received
        if is_second or not self._is_current(frame):
            self.close()
            signal.raise_signal(number)
            return
        self.received = number
        self.request()
