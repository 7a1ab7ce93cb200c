"""Queue of scheduled tasks: results, errors and waiting for them."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Iterable
from typing import Any

from keras_strategies.errors import ClosureCancelledError, ClusterTimeoutError
from keras_strategies.parameter_server.coordinator.cluster_state import QueuedTask
from keras_strategies.user_warnings import warn_user

_MAX_QUEUED = 256
#: The value of a step that no worker had a batch for.
END_OF_INPUT = object()


class TaskQueue:
    """Tasks that have not finished, and the first error of one.

    Args:
        is_running: whether a worker runs a task.
    """

    def __init__(self, is_running: Callable[[], bool]):
        self._is_running = is_running
        self.condition = threading.Condition()
        self.waiting: collections.deque[QueuedTask] = collections.deque()
        #: The first error of a task, until it is raised.
        self.error: BaseException | None = None
        #: The error that has ended the cluster.
        self.fatal: BaseException | None = None
        #: Warnings to emit in the user's thread.
        self.warnings: collections.deque[str] = collections.deque()
        self._unfinished: set[int] = set()
        self._next_task = 0

    # Called in the user's threads

    def add(self, task: QueuedTask) -> None:
        """Numbers and queues a task; blocks only while the queue is full."""
        self.emit_warnings()
        with self.condition:
            self.condition.wait_for(
                lambda: len(self.waiting) < _MAX_QUEUED or self._is_broken()
            )
            self.raise_error()
            task.number = self._next_task
            self._next_task += 1
            self._unfinished.add(task.number)
            self.waiting.append(task)

    def wait_for_room(self, is_done: Callable[[], bool]) -> bool:
        """Waits until a task is finished, or until the queue is empty.

        Args:
            is_done: whether the task is finished.

        Returns:
            Whether it is finished.
        """
        with self.condition:
            self.condition.wait_for(
                lambda: is_done() or not self.waiting or self._is_broken()
            )
        return is_done()

    def wait_until_done(self, timeout: float | None = None) -> None:
        """Waits for all tasks; raises the first error."""
        with self.condition:
            finished = self.condition.wait_for(
                lambda: not self._unfinished or self.fatal is not None, timeout
            )
            self.emit_warnings()
            self.raise_error()
            if not finished:
                raise ClusterTimeoutError(
                    f"{len(self._unfinished)} scheduled functions had not finished "
                    f"after {timeout:g} seconds. They are still queued or running: "
                    "call `join` again, or see `coordinator.status()`."
                )

    def abandon(self, seconds: float) -> None:
        """Drops queued tasks and waits for running ones, without errors."""
        with self.condition:
            self.cancel(ClosureCancelledError("Training ended before this step."))
            self.condition.wait_for(
                lambda: not self._is_running() or self.fatal is not None, seconds
            )
            self.error = None

    def discard_error(self, error: BaseException) -> None:
        """Discards an error that the caller has raised."""
        with self.condition:
            if self.error is error:
                self.error = None

    def is_done(self) -> bool:
        with self.condition:
            self.raise_error()
            return not self._unfinished

    def raise_error(self) -> None:
        """Raises the first error of a task, once; a fatal one always."""
        with self.condition:
            if self.fatal is not None:
                raise self.fatal
            if self.error is None:
                return
            # Running tasks still count; none is left when this returns.
            self.condition.wait_for(
                lambda: not self._is_running() or self.fatal is not None
            )
            error, self.error = self.error, None
            if error is not None:
                raise error

    def emit_warnings(self) -> None:
        """Emits the warnings of the scheduler's thread in the user's thread."""
        while self.warnings:
            warn_user(self.warnings.popleft())

    def _is_broken(self) -> bool:
        return self.error is not None or self.fatal is not None

    # Called in the scheduler's thread, with the condition's lock

    @property
    def first_unfinished(self) -> int:
        """int, all tasks below this number are finished."""
        return min(self._unfinished, default=self._next_task)

    def finish(self, pending: QueuedTask, value: Any) -> None:
        """Sets the result of a task."""
        self._unfinished.discard(pending.number)
        pending.result(value, None)

    def fail(self, pending: QueuedTask, error: BaseException) -> None:
        """Fails a task and, if it is the first one, cancels the queued ones."""
        self._unfinished.discard(pending.number)
        pending.result(None, error)
        if self.error is None:
            self.error = error
            self.cancel(
                ClosureCancelledError(
                    "This function was cancelled because one that was scheduled "
                    f"before it failed: {type(error).__name__}: {error}"
                )
            )

    def cancel(self, error: BaseException) -> None:
        """Fails all queued tasks."""
        while self.waiting:
            pending = self.waiting.popleft()
            self._unfinished.discard(pending.number)
            pending.result(None, error)

    def fail_all(self, running: Iterable[QueuedTask], error: BaseException) -> None:
        """Fails queued and running tasks with a fatal error."""
        self.fatal = error
        self.cancel(error)
        for pending in running:
            self._unfinished.discard(pending.number)
            pending.result(None, error)
        self.condition.notify_all()
