"""What the coordinator and the workers say to each other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class FunctionDefinition:
    """A function that tasks will call, sent once.

    Args:
        number: int, its name.
        kind: str, `"call"` for a function of its arguments, `"train"`, `"test"` and
            `"predict"` for a model's step.
        blob: bytes, the function or the model, pickled.
        generation: int, higher for what was pickled later.
        variables: tuple of int, the numbers of the variables in it.
    """

    number: int
    kind: str
    blob: bytes
    generation: int
    variables: tuple[int, ...]


@dataclass(frozen=True)
class ScheduledTask:
    """One closure to be run.

    Args:
        number: int, its name; also that of its updates.
        definition: int, what to call.
        arguments: for a model's step a list of batches; for a function its pickled
            arguments, bytes.
        local: dict from the numbers of variables that no server has to their values.
        done: int, all closures below this number are done.
        generation: int, of the arguments.
        pulls_ahead: bool, whether the values of the step after the next one are asked
            for when this one is done; the next one then misses its update.
    """

    number: int
    definition: int
    arguments: Any
    local: dict[int, np.ndarray] = field(default_factory=dict)
    done: int = 0
    generation: int = 0
    pulls_ahead: bool = False


@dataclass(frozen=True)
class TaskResult:
    """What became of a task.

    Args:
        number: int, the task's.
        value: what it returned, with arrays of NumPy.
        error: what it raised, None if it did not.
        local: changes of variables that no server has.
        seconds: float, how long it took.
        steps: int, how many steps it made.
        traffic: bytes that the worker has sent to servers and received since the last
            outcome.
        staleness: updates that its steps have missed, in all and at most.
    """

    number: int
    value: Any = None
    error: BaseException | None = None
    local: dict[int, np.ndarray] = field(default_factory=dict)
    seconds: float = 0.0
    steps: int = 1
    traffic: tuple[int, int] = (0, 0)
    staleness: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class WorkerReference:
    """Stands for something that each worker has one of its own of.

    Args:
        number: int, its name.
    """

    number: int


@dataclass(frozen=True)
class WorkerResource:
    """How a worker makes what a `WorkerReference` stands for.

    Args:
        number: int.
        kind: str, `"value"` or `"iterator"`.
        blob: bytes, the pickled function, or the dataset's `WorkerReference` number.
        generation: int.
    """

    number: int
    kind: str
    blob: Any
    generation: int
