"""State of the lead: workers, the current generation, and what they wait for."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from keras_strategies.lead.events import AwaitsFile, Saved

#: Reason for the loss of a worker with an open connection.
NO_HEARTBEAT = "no heartbeat"
#: Reason for the loss of a worker that is alive, and does not arrive where others wait.
NO_ARRIVAL = "the others have waited for it"
#: Reason for the loss of a worker that has come to the end of its script.
EXITED = "it exited"
NONE: frozenset[str] = frozenset()
T = TypeVar("T")


def replace(value: T, **changes: Any) -> T:
    """As `dataclasses.replace`, in a fifth of its time: each message needs some."""
    changed = object.__new__(type(value))
    changed.__dict__.update(value.__dict__, **changes)
    return changed


class Phase(enum.Enum):
    """Phase of a generation (see `decisions.py`)."""

    FORMING = "forming"
    SYNCING = "syncing"
    RUNNING = "running"
    PAUSING = "pausing"
    STOPPING = "stopping"
    OVER = "over"


@dataclass(frozen=True)
class Settings:
    """Numbers and times of a group.

    Args:
        workers: int, workers of the cluster.
        min_workers: int, the smallest generation.
        max_workers: int or None, the largest one; None for all workers.
        rejoin: bool, whether workers may join after the start.
        is_fixed: bool, whether all workers are needed, and a loss is an error.
        timeout: float, seconds of silence after which a worker is lost, and in which a
            lost connection may be replaced.
        patience: float, seconds to wait for workers that are alive.
        failures: int, failures of a generation without a loss or a step in between,
            after which training ends.
        addresses: the workers' addresses, for messages.
        grace: float, seconds in which a lost connection can be continued, before it
            ends the generation.
    """

    workers: int
    min_workers: int = 1
    max_workers: int | None = None
    rejoin: bool = True
    is_fixed: bool = False
    timeout: float = 10.0
    patience: float = 300.0
    failures: int = 10
    addresses: tuple[str, ...] = ()
    grace: float = 0.2

    @property
    def least(self) -> int:
        """int, the smallest generation."""
        return self.workers if self.is_fixed else self.min_workers

    @property
    def most(self) -> int:
        """int, the largest generation."""
        return self.max_workers or self.workers

    @property
    def of_workers(self) -> dict[str, Any]:
        """dict of those that workers decide; the rest describes the cluster."""
        names = ("min_workers", "max_workers", "rejoin", "is_fixed", "timeout")
        return {name: getattr(self, name) for name in (*names, "patience")}

    def named(self, indices: Iterable[int]) -> str:
        """Text such as "worker 1 (10.0.0.2:2222) and worker 3 (10.0.0.4:2222)"."""
        return " and ".join(f"worker {i}{self._address(i)}" for i in indices)

    def _address(self, index: int) -> str:
        return f" ({self.addresses[index]})" if index < len(self.addresses) else ""


class Loss(NamedTuple):
    """A lost worker.

    Args:
        worker: int, its number in the cluster.
        rank: int, its rank in its generation.
        host: str, its address.
        pid: int, its process.
        progress: str, its last step, such as "step 12 of fit".
        how: str, the reason.
        late: str, a sentence about the time of its steps; may be empty.
    """

    worker: int
    rank: int
    host: str
    pid: int
    progress: str
    how: str
    late: str = ""

    @property
    def is_silent(self) -> bool:
        """bool, whether it was lost without the end of its connection."""
        return self.how.startswith((NO_HEARTBEAT, NO_ARRIVAL))

    @property
    def has_exited(self) -> bool:
        """bool, whether its script ended, without an error, while others wait."""
        return self.how.startswith(EXITED)

    def __str__(self) -> str:
        at = f" at {self.progress}" if self.progress else ""
        return (
            f"Worker {self.worker} ({self.host}, process {self.pid}) was lost{at}: "
            f"{self.how.removesuffix('.')}.{self.late}"
        )


@dataclass(frozen=True)
class KnownWorker:
    """A process, as the lead knows it.

    Args:
        uid: str, the process.
        index: int, its number in the cluster, which a later process may take over.
        host: str, its address.
        pid: int, its number on its machine.
        since: float, when it connected.
        seen: float, when its last message came.
        step: int, the last step that it has finished; None without a state.
        gone: float, when its connection ended; None while it is connected.
        progress: str, such as "step 12 of fit".
        times: as those of `Beat`.
        line: str, the line of its script that it executed last, if it was asked.
        failure: str, the error by which it has left a call.
        admits: bool, whether new workers can begin after its step.
    """

    uid: str
    index: int
    host: str
    pid: int
    since: float
    seen: float
    step: int | None = None
    gone: float | None = None
    progress: str = ""
    times: tuple[float, ...] = ()
    line: str = ""
    failure: str = ""
    admits: bool = True

    def __str__(self) -> str:
        at = f", at {self.progress}" if self.progress else ""
        line = f", in {self.line}" if self.line else ""
        return f"worker {self.index} ({self.host}, process {self.pid}{at}{line})"


@dataclass(frozen=True)
class GenerationState:
    """A generation.

    Args:
        number: int, counted from 1.
        ranks: the rank of each member by uid; rank 0 is the chief.
        indices: the members' numbers in the cluster, by rank.
        step: int, the finished steps at its begin.
        phase: `Phase`.
        awaited: uids of the workers without which the phase does not end.
        since: float, when the phase began.
        last_step: int, the steps of the generation after which members stop.
        failures: int, how often it has failed at this step without a loss.
        how: str, why it has ended.
    """

    number: int = 0
    ranks: Mapping[str, int] = field(default_factory=dict)
    indices: tuple[int, ...] = ()
    step: int = 0
    phase: Phase = Phase.FORMING
    awaited: frozenset[str] = NONE
    since: float = 0.0
    last_step: int = 0
    failures: int = 0
    how: str = ""

    @property
    def is_active(self) -> bool:
        """bool, whether the generation has begun and not ended."""
        return self.phase not in (Phase.FORMING, Phase.OVER)


@dataclass(frozen=True)
class Comparison:
    """Values that have arrived: equal ones once, with the ranks as bits of a number."""

    since: float
    values: Mapping[tuple[str, str], int] = field(default_factory=dict)
    arrived: int = 0
    is_late: bool = False

    @property
    def what(self) -> str:
        """str, name of the first value."""
        return next(iter(self.values))[0]

    def add(self, what: str, value: str, ranks: int) -> Comparison:
        """The comparison with the value of other ranks, bits of a number."""
        key = what, value
        values = {**self.values, key: self.values.get(key, 0) | ranks}
        return replace(self, values=values, arrived=self.arrived | ranks)


@dataclass(frozen=True)
class LeadState:
    """All that the lead knows.

    Args:
        settings: `Settings`.
        clock: float, seconds in which the lead ran.
        now: float, the time of the last `Tick`; None before the first.
        same: what must agree on all workers, and the first worker's index.
        workers: workers by uid, until they end or are given up.
        waiting: uids of the workers that wait for a generation.
        group: `GenerationState`, the current or last generation.
        comparisons: by stream and number.
        files: the chief's saved files by position.
        file_waits: by uid, and when they began.
        chief_position: float, comparisons that the chief has begun.
        left: members of the generation that have finished their scripts, by uid.
        snapshot: step and path of the newest one.
        has_run: bool, whether a generation has run; then none begins without a state.
        is_stop_asked: bool, whether a worker asks all to stop after the same step.
        completed: int, the step of a worker that has finished training; or -1.
        verdict: str, why training cannot continue; empty if it has ended.
        is_misuse: bool, whether the verdict is about the description of the cluster.
    """

    settings: Settings
    clock: float = 0.0
    now: float | None = None
    same: tuple[int, Mapping[str, Any]] | None = None
    workers: Mapping[str, KnownWorker] = field(default_factory=dict)
    waiting: frozenset[str] = NONE
    group: GenerationState = GenerationState()
    comparisons: Mapping[tuple[str, int], Comparison] = field(default_factory=dict)
    files: Mapping[int, tuple[Saved, ...]] = field(default_factory=dict)
    file_waits: Mapping[str, tuple[AwaitsFile, float]] = field(default_factory=dict)
    chief_position: float = 0
    left: Mapping[str, KnownWorker] = field(default_factory=dict)
    snapshot: tuple[int, str] | None = None
    has_run: bool = False
    is_stop_asked: bool = False
    completed: int = -1
    verdict: str = ""
    is_misuse: bool = False

    @property
    def is_over(self) -> bool:
        """bool, whether training has ended."""
        return self.group.phase is Phase.OVER

    @property
    def members(self) -> list[KnownWorker]:
        """Members that have not ended, by rank."""
        return [self.workers[uid] for uid in self.group.ranks if uid in self.workers]

    def is_present(self, worker: KnownWorker) -> bool:
        """Whether a worker is connected and not silent."""
        silent = self.clock - worker.seen
        return worker.gone is None and silent <= self.settings.timeout

    def loss_of(self, worker: KnownWorker, how: str) -> Loss:
        """The loss of a worker; its own failure report has more details than `how`."""
        others = [w.times[1] for w in self.members if w is not worker and w.times]
        return Loss(
            worker.index,
            self.group.ranks.get(worker.uid, -1),
            worker.host,
            worker.pid,
            worker.progress,
            worker.failure or how,
            lateness(worker.times, others),
        )

    # Changed states

    def with_group(self, **changes: Any) -> LeadState:
        """The state with a changed group."""
        return replace(self, group=replace(self.group, **changes))

    def with_workers(self, *uids: str, **changes: Any) -> LeadState:
        """The state with changed workers."""
        changed = {uid: replace(self.workers[uid], **changes) for uid in uids}
        return replace(self, workers={**self.workers, **changed})

    def without(self, uid: str) -> LeadState:
        """The state without a worker."""
        workers = {other: each for other, each in self.workers.items() if other != uid}
        return replace(self, workers=workers).left_phase(uid)

    def left_phase(self, *uids: str) -> LeadState:
        """The workers are neither awaited nor wait."""
        waits = self.file_waits
        if not waits.keys().isdisjoint(uids):
            waits = {key: each for key, each in waits.items() if key not in uids}
        state = replace(self, waiting=self.waiting.difference(uids), file_waits=waits)
        return state.with_group(awaited=self.group.awaited.difference(uids))


def ranks_of(bits: int) -> list[int]:
    """The ranks that are bits of a number."""
    return [rank for rank in range(bits.bit_length()) if bits >> rank & 1]


def uids_of(workers: Iterable[KnownWorker]) -> tuple[str, ...]:
    """The processes of workers."""
    return tuple(each.uid for each in workers)


def lateness(times: Sequence[float], others: Iterable[float]) -> str:
    """A sentence about the time of a worker's steps; empty if it is not known.

    Args:
        times: those of `Beat`.
        others: seconds of the steps of other workers, without waits.
    """
    if not times or not times[0] or not (ordered := sorted(others)):
        return ""
    middle = len(ordered) // 2
    median = (ordered[middle] + ordered[~middle]) / 2
    return (
        f" Its last steps took {1000 * times[1]:.0f} ms each without waits for other "
        f"workers, those of the others {1000 * median:.0f} ms."
    )
