"""Replicas that are traced one after the other, each until it meets the others.

Replicas whose shapes or whose Python differ cannot be one program that all devices
run alike. They are traced side by side into one program instead: each in a thread of
its own, of which one runs at a time, so that what one leaves in a collective is there
for the others.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from keras_strategies import keras_compat
from keras_strategies.engines.jax import jax_compat
from keras_strategies.errors import ReplicaAbortedError, ReplicaMismatchError


@dataclass
class _Meeting:
    """What a replica has come with to a collective."""

    kind: str
    value: Any
    merge: Callable[[list[Any]], list[Any]]


class _Current(threading.local):
    strand: Strand | None = None


_current = _Current()


class Strand:
    """One replica: a thread that runs when it is told to, until it meets others."""

    def __init__(self, number: int, task: Callable[[], Any]):
        self.number = number
        self._task = task
        self._go = threading.Semaphore(0)
        self._stopped = threading.Semaphore(0)
        self._answer: Any = None
        self._abort: BaseException | None = None
        self.meeting: _Meeting | None = None
        self.result: Any = None
        self.error: BaseException | None = None
        self.is_done = False
        self._trace = jax_compat.current_trace()
        self._keras = keras_compat.thread_state()
        self._thread = threading.Thread(
            target=self._run, name=f"trace-replica-{number}", daemon=True
        )

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        self._go.acquire()
        _current.strand = self
        try:
            if self._abort is not None:
                raise self._abort
            with (
                jax_compat.with_trace(self._trace),
                keras_compat.with_thread_state(self._keras),
            ):
                self.result = self._task()
        except BaseException as error:  # Handed to the thread that waits.
            self.error = error
        finally:
            self.is_done = True
            self.meeting = None
            self._stopped.release()

    def proceed(self, answer: Any = None) -> None:
        """Runs the replica until it meets the others or ends."""
        self._answer = answer
        self._go.release()
        self._stopped.acquire()

    def abort(self) -> None:
        """Ends the replica where it waits."""
        kind = self.meeting.kind if self.meeting else "its first call"
        self._abort = ReplicaAbortedError(f"Stopped in `{kind}`: another one failed.")
        while not self.is_done:
            self.proceed()
        self._thread.join()

    def join(self) -> None:
        self._thread.join()

    def meet(self, meeting: _Meeting) -> Any:
        self.meeting = meeting
        self._stopped.release()
        self._go.acquire()
        if self._abort is not None:
            raise self._abort
        return self._answer


def meet(kind: str, value: Any, merge: Callable[[list[Any]], list[Any]]) -> Any:
    """Waits for the other replicas' values; returns this one's part of the merge.

    Args:
        kind: str, the name of the call, which has to be that of the others.
        value: what this replica brings.
        merge: makes the replicas' results of their values, in the thread that
            started the replicas.
    """
    strand = _current.strand
    assert strand is not None
    return strand.meet(_Meeting(kind, value, merge))


def run_in_lockstep(tasks: Sequence[Callable[[], Any]]) -> list[Any]:
    """Runs one task per replica, from collective to collective; their results.

    Raises:
        RuntimeError: if the replicas do not make the same calls.
    """
    strands = [Strand(number, task) for number, task in enumerate(tasks)]
    with contextlib.ExitStack() as ends:
        for strand in strands:
            strand.start()
            ends.callback(strand.abort)
        answers: list[Any] = [None] * len(strands)
        while True:
            for strand, answer in zip(strands, answers, strict=True):
                strand.proceed(answer)
                if strand.error is not None:
                    raise strand.error
            if all(strand.is_done for strand in strands):
                break
            meetings = _meetings(strands)
            answers = meetings[0].merge([meeting.value for meeting in meetings])
        return [strand.result for strand in strands]


def _meetings(strands: Sequence[Strand]) -> list[_Meeting]:
    """The collective that all replicas are in."""
    waiting = [strand for strand in strands if strand.meeting is not None]
    assert waiting[0].meeting is not None
    kind = waiting[0].meeting.kind
    for strand in strands:
        if strand.meeting is None:
            raise ReplicaMismatchError(
                f"Replica {strand.number} has ended without the call of `{kind}` that "
                "the others wait in. All replicas must make the same collective "
                "calls; check for a branch on the replica or on its data."
            )
        if strand.meeting.kind != kind:
            raise ReplicaMismatchError(
                f"Replica {strand.number} called `{strand.meeting.kind}` where another "
                f"replica called `{kind}`. All replicas must make the same collective "
                "calls in the same order."
            )
    return [strand.meeting for strand in strands if strand.meeting is not None]
