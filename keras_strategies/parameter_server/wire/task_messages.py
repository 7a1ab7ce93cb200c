"""Messages between the coordinator and the workers: functions, tasks, results."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from keras_strategies.processes.portable_exceptions import PortableException


@dataclass(frozen=True)
class FunctionDefinition:
    """A function that tasks call, sent to each worker once.

    Args:
        number: int, its number.
        kind: str, `"call"` for a function of its arguments, `"train"`, `"test"` and
            `"predict"` for a model's step.
        blob: bytes, the function or the model, pickled.
        generation: int, higher for later pickles.
        variables: tuple of int, the numbers of the variables in it.
        name: str, for messages: `"function 'step' (train.py:12)"`.
        worker_values: tuple of int, the numbers of the `WorkerResource`s in it.
    """

    number: int
    kind: str
    blob: bytes
    generation: int
    variables: tuple[int, ...]
    name: str = "a function"
    worker_values: tuple[int, ...] = ()


@dataclass(frozen=True)
class ScheduledTask:
    """A scheduled call of a function or of a model's steps.

    Args:
        number: int, its number, part of its updates' names.
        definition: int, number of the `FunctionDefinition`.
        arguments: for a model's step a list of batches; for a function its pickled
            arguments, bytes.
        local: dict from the numbers of variables on no server to their values.
        done: int, all tasks below this number are finished.
        generation: int, of the arguments.
        pulls_ahead: bool, whether this step's push pulls the values of the step after
            the next one, which then misses this update.
        variables: tuple of int, the numbers of the variables in the arguments.
        worker_values: tuple of int, the numbers of the `WorkerResource`s in the
            arguments.
    """

    number: int
    definition: int
    arguments: Any
    local: dict[int, np.ndarray] = field(default_factory=dict)
    done: int = 0
    generation: int = 0
    pulls_ahead: bool = False
    variables: tuple[int, ...] = ()
    worker_values: tuple[int, ...] = ()


@dataclass(frozen=True)
class PickledResult:
    """The return value of a function, unpickled separately from its message.

    Args:
        blob: bytes.
        buffers: tuple of buffers, the memory of its arrays.
    """

    blob: bytes
    buffers: tuple[Any, ...]


@dataclass(frozen=True)
class TaskResult:
    """The result of a task.

    Args:
        number: int, the task's.
        value: the result of a model's steps, with NumPy arrays; of a function a
            `PickledResult`.
        error: `PortableException`; None without one.
        local: changes of variables on no server.
        seconds: float, duration.
        steps: int, number of steps.
        traffic: bytes sent to and received from servers since the last result.
        staleness: updates that its steps have missed, total and maximum.
        changes: names of objects that the function refers to, of which it has changed
            the worker's copy.
        full_tables: bytes of large tables that its steps have pulled in full, by path.
    """

    number: int
    value: Any = None
    error: PortableException | None = None
    local: dict[int, np.ndarray] = field(default_factory=dict)
    seconds: float = 0.0
    steps: int = 1
    traffic: tuple[int, int] = (0, 0)
    staleness: tuple[int, int] = (0, 0)
    changes: tuple[str, ...] = ()
    full_tables: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class ReleasedNumbers:
    """Objects that no longer exist on the coordinator, and that no task uses.

    Args:
        definitions: numbers of `FunctionDefinition`s.
        variables: numbers of variables.
        objects: numbers of Keras objects.
        resources: numbers of `WorkerResource`s.
    """

    definitions: tuple[int, ...]
    variables: tuple[int, ...]
    objects: tuple[int, ...]
    resources: tuple[int, ...] = ()


@dataclass(frozen=True)
class WorkerReference:
    """Reference to a value that exists once per worker.

    Args:
        number: int, its number.
    """

    number: int


@dataclass(frozen=True)
class WorkerResource:
    """Definition of the value of a `WorkerReference`.

    Args:
        number: int.
        kind: str, `"value"` or `"iterator"`.
        blob: bytes, the pickled function, or int, the number of the dataset's
            `WorkerReference`.
        generation: int.
        worker_values: tuple of int, the numbers of other `WorkerResource`s in it.
    """

    number: int
    kind: str
    blob: Any
    generation: int
    worker_values: tuple[int, ...] = ()
