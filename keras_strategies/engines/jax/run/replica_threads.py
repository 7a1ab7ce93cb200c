"""Threads that trace one replica each, in lockstep from collective to collective.

Replicas with different shapes or different Python cannot be one SPMD program. They are
traced one after the other into one program instead, each in a thread. One thread runs
at a time: up to its next collective, where it waits for the operands of the others.

# State of a thread

- The current trace: the caller's, since all replicas are one program.
- Options of JAX (`jax.default_matmul_precision`, `jax.enable_x64`, `jax.debug_nans`):
  those of the caller's contexts, since each thread begins with the process's.
- Python's context variables: a copy of the caller's, since those of NumPy and of users
  act in the function.
- Keras's scopes: the caller's, and the replica's variables.
- State of the process (compiled programs, backends, Keras's defaults): shared, since
  one thread runs at a time.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from keras_strategies.engines.jax import compat
from keras_strategies.errors import ReplicaAbortedError, ReplicaMismatchError
from keras_strategies.keras_compat.thread_state import thread_state, with_thread_state


@dataclass
class _CollectiveCall:
    """A replica's operands in a collective."""

    kind: str
    value: Any
    merge: Callable[[list[Any]], list[Any]]


class _Current(threading.local):
    thread: ReplicaThread | None = None


_current = _Current()


class ReplicaThread:
    """The trace of one replica, which runs from collective to collective."""

    def __init__(self, number: int, task: Callable[[], Any]):
        self.number = number
        self._task = task
        self._resumed = threading.Semaphore(0)
        self._stopped = threading.Semaphore(0)
        self._call_result: Any = None
        self._abort: BaseException | None = None
        self.call: _CollectiveCall | None = None
        self.result: Any = None
        self.error: BaseException | None = None
        self.is_done = False
        self._trace = compat.current_trace()
        self._keras = thread_state()
        self._options = compat.options_of_thread()
        self._variables = contextvars.copy_context()
        self._thread = threading.Thread(
            target=self._variables.run,
            args=(self._run,),
            name=f"trace-replica-{number}",
            daemon=True,
        )

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        self._resumed.acquire()
        _current.thread = self
        try:
            if self._abort is not None:
                raise self._abort
            with (
                compat.with_options(self._options),
                compat.with_trace(self._trace),
                with_thread_state(self._keras),
            ):
                self.result = self._task()
        except BaseException as error:  # Raised in the thread that waits.
            self.error = error
        finally:
            self.is_done = True
            self.call = None
            self._stopped.release()

    def resume(self, call_result: Any = None) -> None:
        """Runs the replica up to its next collective, or its end."""
        self._call_result = call_result
        self._resumed.release()
        self._stopped.acquire()

    def abort(self) -> None:
        """Raises `ReplicaAbortedError` in the collective where the replica waits."""
        kind = self.call.kind if self.call else "run"
        self._abort = ReplicaAbortedError(f"Stopped in {kind}: another replica failed.")
        while not self.is_done:
            self.resume()
        self._thread.join()

    def join(self) -> None:
        self._thread.join()

    def wait(self, call: _CollectiveCall) -> Any:
        self.call = call
        self._stopped.release()
        self._resumed.acquire()
        if self._abort is not None:
            raise self._abort
        return self._call_result


def collective_call(
    kind: str, value: Any, merge: Callable[[list[Any]], list[Any]]
) -> Any:
    """Combines the replicas' operands; returns this replica's result.

    Args:
        kind: str, the name of the call, equal on all replicas.
        value: this replica's operands.
        merge: computes the replicas' results from their operands, in the thread that
            started the replicas.
    """
    thread = _current.thread
    assert thread is not None
    return thread.wait(_CollectiveCall(kind, value, merge))


def run_in_lockstep(tasks: Sequence[Callable[[], Any]]) -> list[Any]:
    """Runs one task per replica, from collective to collective; returns their results.

    Raises:
        RuntimeError: if the replicas do not make the same calls.
    """
    threads = [ReplicaThread(number, task) for number, task in enumerate(tasks)]
    with contextlib.ExitStack() as ends:
        for thread in threads:
            thread.start()
            ends.callback(thread.abort)
        call_results: list[Any] = [None] * len(threads)
        while True:
            for thread, call_result in zip(threads, call_results, strict=True):
                thread.resume(call_result)
                if thread.error is not None:
                    raise thread.error
            if all(thread.is_done for thread in threads):
                break
            calls = _pending_calls(threads)
            call_results = calls[0].merge([call.value for call in calls])
        return [thread.result for thread in threads]


def _pending_calls(threads: Sequence[ReplicaThread]) -> list[_CollectiveCall]:
    """The call of the same collective on each replica."""
    waiting = [thread for thread in threads if thread.call is not None]
    assert waiting[0].call is not None
    kind = waiting[0].call.kind
    for thread in threads:
        if thread.call is None:
            raise ReplicaMismatchError(
                f"Replica {thread.number} ended without calling `{kind}`, in which "
                "other replicas wait. All replicas must make the same collective "
                "calls; check for a branch on the replica or on its data."
            )
        if thread.call.kind != kind:
            raise ReplicaMismatchError(
                f"Replica {thread.number} called `{thread.call.kind}` where another "
                f"replica called `{kind}`. All replicas must make the same collective "
                "calls in the same order."
            )
    return [thread.call for thread in threads if thread.call is not None]
