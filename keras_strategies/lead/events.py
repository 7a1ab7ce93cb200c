"""Events that the lead decides about, and the messages with which it answers.

All but `Hello`, `Gone` and `Tick` are sent by workers, as messages with the name of the
class in small letters and its fields after `uid`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

#: Seconds between two `Tick`s. Longer intervals are pauses of the lead, not silence.
TICK = 0.25


@dataclass(frozen=True)
class Hello:
    """A worker has connected, possibly again.

    Args:
        uid: str, the process.
        index: int, its number in the cluster.
        host: str, its address, as the lead sees it.
        pid: int, its process number on its machine.
        same: dict of values that must agree on all workers, by name.
        generation: int, the generation that it is in; 0 outside of one.
        step: int, the last step that it has finished; None without a state.
    """

    uid: str
    index: int
    host: str = ""
    pid: int = 0
    same: Mapping[str, Any] = field(default_factory=dict)
    generation: int = 0
    step: int | None = None


class Gone(NamedTuple):
    """The connection of a worker has ended, and was not continued in time.

    Args:
        uid: str, the process.
        heard: the last `Beat` since the last `Tick`; None without one.
    """

    uid: str
    heard: Beat | None = None


class Ready(NamedTuple):
    """A worker has left its generation with the state after `step`, and waits.

    Args:
        uid: str, the process.
        step: int, the last finished step; None without a state.
        is_planned: bool, whether it left after the step to stop after.
        admits: bool, whether new workers can begin after its step.
        others: uids of processes that have sent the same.
    """

    uid: str
    step: int | None
    is_planned: bool = False
    admits: bool = True
    others: tuple[str, ...] = ()


class Holds(NamedTuple):
    """A member has the state with which its generation begins; `others` as well."""

    uid: str
    generation: int
    step: int
    others: tuple[str, ...] = ()


class Begun(NamedTuple):
    """Answer to `pause`: the steps that a member has begun in its generation."""

    uid: str
    generation: int
    steps: int


class Stop(NamedTuple):
    """A worker asks all members to stop after the same step."""

    uid: str


class Arrived(NamedTuple):
    """A member compares a value with the others.

    Args:
        uid: str, the process.
        generation: int, its generation.
        stream: str, separates the calls of threads.
        number: int, counts the comparisons of a stream.
        what: str, name of the value, the same on all workers.
        value: str.
        others: uids of processes that have sent the same.
    """

    uid: str
    generation: int
    stream: str
    number: int
    what: str
    value: str
    others: tuple[str, ...] = ()


class Saved(NamedTuple):
    """The chief has saved a file, or failed to (see `files.py`)."""

    uid: str
    generation: int
    position: int
    name: str
    error: str


class AwaitsFile(NamedTuple):
    """A member waits for a file of the chief (see `files.py`).

    Args:
        uid: str, the process.
        generation: int, its generation.
        position: int, the comparisons that the worker has begun.
        name: str, of the file in this worker's call.
        same: int, its calls at this position with this name, this one included.
        calls: int, its calls at this position, this one included.
    """

    uid: str
    generation: int
    position: int
    name: str
    same: int
    calls: int


class Snapshot(NamedTuple):
    """A snapshot of the state after `step` was written."""

    uid: str
    step: int
    path: str


class Failed(NamedTuple):
    """A member leaves a call by an error.

    Args:
        uid: str, the process.
        how: str, the error in one line.
        progress: str, such as "step 12 of fit".
        call: int, the number of the call.
    """

    uid: str
    how: str
    progress: str
    call: int


class Absent(NamedTuple):
    """A worker says why another one cannot come."""

    uid: str
    why: str


class Stack(NamedTuple):
    """Answer to `where`: what the main thread of a worker executes.

    Args:
        uid: str, the process.
        line: str, line of its script, such as "train.py, line 31, in load".
    """

    uid: str
    line: str


class Overdue(NamedTuple):
    """Others have waited for a member for too long, in their engine."""

    uid: str
    how: str


class AskStatus(NamedTuple):
    """A worker asks for a table of all workers."""

    uid: str


class Bye(NamedTuple):
    """A worker ends; `is_complete` if its script has not failed."""

    uid: str
    is_complete: bool
    how: str


class Beat(NamedTuple):
    """What a worker reports regularly.

    Args:
        step: int, the last finished step; None if it is as before.
        progress: str, such as "step 12 of fit"; None if it is as before.
        times: finished steps, and seconds per step without and with waits for others;
            empty if they are as before.
    """

    step: int | None = None
    progress: str | None = None
    times: tuple[float, ...] = ()


class Tick(NamedTuple):
    """Time passes.

    Args:
        now: float, seconds.
        heard: workers with messages since the last `Tick`, with what their beats say. A
            beat before another message says no step, which would be older.
    """

    now: float
    heard: Mapping[str, Beat]


class Message(NamedTuple):
    """A message to workers.

    Args:
        to: uids.
        kind: str.
        body: dict.
    """

    to: tuple[str, ...]
    kind: str
    body: dict[str, Any]


class Out(list[Message]):
    """Messages to send."""

    def tell(self, to: Iterable[str], kind: str, **body: Any) -> None:
        """Adds a message to the processes `to`."""
        self.append(Message(tuple(to), kind, body))


#: Those that many workers send at the same time, with the same values.
JOINT = frozenset({"ready", "holds", "arrived"})
