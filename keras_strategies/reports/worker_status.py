"""`strategy.status()`: workers and the times of their steps, as a table."""

from __future__ import annotations

import os
from dataclasses import dataclass

from keras_strategies.cluster.group import WorkerGroup
from keras_strategies.cluster.group.step_clock import WINDOW
from keras_strategies.text_tables import ShownAsTable, Table, counted

_HEADER = ("worker", "address", "process", "state", "steps", "ms", "waits", "late")
_NUMBERS = frozenset({"steps", "ms", "waits", "late"})


@dataclass(frozen=True)
class WorkerStatus:
    """Status of a worker, with times in seconds per step: means of the last 20.

    Args:
        index: int, its number.
        address: str, its host.
        process: int, its process number.
        state: str, "alive" or "lost".
        steps: int, finished steps.
        seconds: float, without waits for other workers; on JAX, TensorFlow and with
            NCCL the processor time of the process and the time of input.
        waits: float, waits for other workers.
        late: float, how much longer its steps take than those of the fastest worker.
        is_slow: bool, whether they take twice the median of the others.
    """

    index: int
    address: str
    process: int
    state: str
    steps: int
    seconds: float
    waits: float
    late: float
    is_slow: bool

    def _row(self) -> tuple[str, ...]:
        parts = (self.seconds, self.waits, self.late)
        times = [f"{1000 * each:.1f}" if self.steps else "" for each in parts]
        state = f"{self.state}, slow" if self.is_slow else self.state
        process = str(self.process)
        name = f"worker {self.index}"
        steps = str(self.steps or "")
        return (name, self.address, process, state, steps, *times)


@dataclass(frozen=True, repr=False)
class TrainingStatus(ShownAsTable):
    """Status of the workers of a strategy; prints as text, in a notebook as a table.

    Args:
        title: str, the strategy.
        workers: tuple of `WorkerStatus`, by index.
    """

    title: str
    workers: tuple[WorkerStatus, ...]

    @property
    def workers_alive(self) -> int:
        """int, number of live workers."""
        return sum(worker.state == "alive" for worker in self.workers)

    def _table(self) -> Table:
        title = f"{self.title}: {counted(len(self.workers), 'worker')}"
        rows = tuple(worker._row() for worker in self.workers)
        note = (
            f"Milliseconds per step, means of the last {WINDOW}: without waits for "
            "other workers, those waits, and behind the fastest worker."
        )
        return Table(title, _HEADER, rows, _NUMBERS, note=note)


def worker_status(title: str, group: WorkerGroup | None) -> TrainingStatus:
    """The current status of connected workers.

    Args:
        title: str, the strategy.
        group: the workers; None for this process alone, without measured steps.
    """
    if group is None:
        alone = WorkerStatus(0, "localhost", os.getpid(), "alive", 0, 0, 0, 0, False)
        return TrainingStatus(title, (alone,))
    times = group.times
    fastest = min(each.own for each in times)
    slow, loss = group.slow_workers(), group.loss()
    return TrainingStatus(
        title,
        tuple(
            WorkerStatus(
                index,
                str(member["host"]),
                int(member["pid"]),
                "lost" if loss is not None and loss.rank == index else "alive",
                each.steps,
                each.own,
                each.waits,
                each.own - fastest,
                index in slow,
            )
            for index, (member, each) in enumerate(
                zip(group.members, times, strict=True)
            )
        ),
    )
