"""What the coordinator knows of closures, of processes, and of local variables."""

from __future__ import annotations

import collections
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from keras_strategies.parameter_server.wire.task_messages import ScheduledTask


@dataclass
class QueuedTask:
    """A closure that was scheduled.

    Args:
        task: the task, without the values of local variables.
        result: called with the value and the error once it is known.
        local: numbers of variables that no server has.
    """

    task: ScheduledTask
    result: Callable[[Any, BaseException | None], None]
    local: tuple[int, ...]
    deaths: int = 0


@dataclass
class WorkerState:
    """What is known of a worker."""

    index: int
    incarnation: int = 0
    sender: bytes | None = None
    pid: int = 0
    last_heartbeat: float = 0.0
    in_flight: collections.deque[QueuedTask] = field(default_factory=collections.deque)
    known: set[tuple[str, int]] = field(default_factory=set)
    steps: int = 0
    seconds: float = 0.0
    staleness: int = 0
    most_staleness: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    deaths: int = 0
    failed_starts: int = 0
    is_abandoned: bool = False

    @property
    def is_alive(self) -> bool:
        return self.sender is not None


@dataclass
class ServerState:
    """What is known of a parameter server."""

    index: int
    incarnation: int = 0
    is_ready: bool = False
    pid: int = 0
    last_heartbeat: float = 0.0
    deaths: int = 0
    failed_starts: int = 0
    #: Why its files lack something that was created; "" if they are complete.
    unsaved: str = ""
