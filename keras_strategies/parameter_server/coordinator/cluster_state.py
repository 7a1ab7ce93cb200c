"""State of tasks and processes on the coordinator."""

from __future__ import annotations

import collections
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from keras_strategies.parameter_server.coordinator.cluster_processes import EndCause
from keras_strategies.parameter_server.coordinator.pipelines import Pipelines

#: Number of processes that may have been ended from outside, as by preemption, until
#: the task that they ran, or their start, is taken for the cause.
MAX_OUTSIDE_ENDS = 10


@dataclass
class EndCount:
    """Number of ends of processes, by cause (see `EndCause`)."""

    own: int = 0
    outside: int = 0

    @property
    def total(self) -> int:
        return self.own + self.outside

    def add(self, cause: EndCause) -> None:
        if cause.is_from_outside:
            self.outside += 1
        else:
            self.own += 1

    def is_final(self, max_own: int) -> bool:
        """Whether nothing is tried again after `max_own` ends by the code itself."""
        return self.own >= max_own or self.outside >= MAX_OUTSIDE_ENDS


@dataclass
class QueuedTask:
    """A scheduled task.

    Args:
        definition: int, number of the `FunctionDefinition`.
        arguments: see `ScheduledTask`.
        generation: int, of the arguments.
        result: called with the value and the error of the result.
        local: numbers of variables on no server.
        uses: objects that exist until it is finished.
        number: int, its number in the queue.
        deaths: `EndCount` of the workers that died while they ran it.
        timeouts: int, number of these deaths that `step_timeout_seconds` caused.
        variables: see `ScheduledTask`.
        worker_values: see `ScheduledTask`.
        pipelines: the pipelines that its batches are read from; None for `arguments`.
        place: the pipeline and the position of its first batch, once it is assigned.
    """

    definition: int
    arguments: Any
    generation: int
    result: Callable[[Any, BaseException | None], None]
    local: tuple[int, ...]
    uses: Any
    number: int = -1
    deaths: EndCount = field(default_factory=EndCount)
    timeouts: int = 0
    variables: tuple[int, ...] = ()
    worker_values: tuple[int, ...] = ()
    pipelines: Pipelines | None = None
    place: tuple[int, int] | None = None


@dataclass
class WorkerState:
    """State of a worker."""

    index: int
    incarnation: int = 0
    sender: bytes | None = None
    pid: int = 0
    #: The device of its steps.
    device: str = ""
    last_heartbeat: float = 0.0
    #: The connection of its heartbeats.
    heartbeat_sender: bytes | None = None
    #: Time of its last result, or of the first task of an idle worker.
    last_progress: float = 0.0
    in_flight: collections.deque[QueuedTask] = field(default_factory=collections.deque)
    #: Kind and number of the definitions, resources and placements sent to it.
    known: set[tuple[str, int]] = field(default_factory=set)
    steps: int = 0
    seconds: float = 0.0
    staleness: int = 0
    most_staleness: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    deaths: int = 0
    #: Ends of its processes before the first step.
    failed_starts: EndCount = field(default_factory=EndCount)
    is_abandoned: bool = False

    @property
    def is_alive(self) -> bool:
        return self.sender is not None


@dataclass
class ServerState:
    """State of a parameter server."""

    index: int
    incarnation: int = 0
    is_ready: bool = False
    pid: int = 0
    last_heartbeat: float = 0.0
    deaths: int = 0
    #: Ends of its processes before they were ready.
    failed_starts: EndCount = field(default_factory=EndCount)
    #: Bytes of its process in memory, as it reported.
    resident_bytes: int = 0
    #: Reason why its snapshots are incomplete; "" if they are complete.
    unsaved: str = ""
