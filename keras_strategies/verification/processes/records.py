"""What a process records of a training."""

from __future__ import annotations

import functools
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from keras_strategies.communication.checksums import checksum

Arrays = dict[str, np.ndarray]


@dataclass
class Call:
    """An outermost call of a model.

    Args:
        rows: list of int, a checksum of each row of its inputs.
        outputs: dict of the outputs of its layers that have these rows, in the order
            of computation.
    """

    rows: list[int] = field(default_factory=list)
    outputs: Arrays = field(default_factory=dict)


@dataclass
class StepRecord:
    """A step, which ends with an update of the optimizer.

    Args:
        calls: list of `Call`, with gradients.
        losses: list of float, the values that `backward` began with.
        settings: dict, of the optimizer.
        values: dict of what the script has passed to `ks.observe`, and of logs.
        after: dict of those that were passed after the update.
        gradients, variables: dicts by name; gradients as they were in the update,
            variables after it.
    """

    calls: list[Call] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    settings: dict[str, float] = field(default_factory=dict)
    values: Arrays = field(default_factory=dict)
    after: Arrays = field(default_factory=dict)
    gradients: Arrays = field(default_factory=dict)
    variables: Arrays = field(default_factory=dict)

    @property
    def rows(self) -> list[int]:
        """Checksums of the rows of all calls."""
        return [row for call in self.calls for row in call.rows]

    def outputs(self) -> Arrays:
        """Outputs of all calls, joined along rows."""
        names = dict.fromkeys(name for call in self.calls for name in call.outputs)
        return {
            name: np.concatenate([call.outputs[name] for call in self.calls])
            for name in names
            if all(name in call.outputs for call in self.calls)
        }


@dataclass
class ProcessRecord:
    """A training on one process.

    Args:
        start: dict of the variables before the first step.
        steps: list of `StepRecord`.
        end: what followed the last step.
        evaluated: list of int, checksums of rows of calls without gradients.
        saved: dict of what was saved, by name.
        masks: list of int, checksums of the masks of dropout.
        random: dict from names of layers that draw random numbers otherwise to True.
        notes: dict from lines for the report to True.
        sharded: bool, whether processes have shards of variables.
        versions: dict of str.
    """

    start: Arrays = field(default_factory=dict)
    steps: list[StepRecord] = field(default_factory=list)
    end: StepRecord = field(default_factory=StepRecord)
    evaluated: list[int] = field(default_factory=list)
    saved: Arrays = field(default_factory=dict)
    masks: list[int] = field(default_factory=list)
    random: dict[str, bool] = field(default_factory=dict)
    notes: dict[str, bool] = field(default_factory=dict)
    sharded: bool = False
    versions: dict[str, str] = field(default_factory=dict)


class EnoughSteps(BaseException):
    """Ends the function after the steps to compare; no `except Exception` stops it."""


class Recorder(ABC):
    """Records a training of this process, until `stop`.

    Args:
        steps: int, after which the function is ended; 0 to record all.
    """

    def __init__(self, steps: int):
        self.steps = steps
        self.record = ProcessRecord()
        self.stops: list[Callable[[], None]] = []

    def replace(self, owner: Any, name: str, replacement: Callable[..., Any]) -> None:
        """Replaces a function of the framework until `stop`.

        Args:
            owner: a module or class.
            name: str, its attribute.
            replacement: callable of the original function and its arguments.
        """
        original = getattr(owner, name)

        @functools.wraps(original)
        def replaced(*args: Any, **kwargs: Any) -> Any:
            return replacement(original, *args, **kwargs)

        setattr(owner, name, replaced)
        self.stops.append(lambda: setattr(owner, name, original))

    @property
    def current(self) -> StepRecord:
        """The step that has not ended."""
        return self.record.end

    def step_begins(self) -> None:
        """Called before each part of a step.

        Raises:
            EnoughSteps: if all steps have been recorded.
        """
        if self.steps and len(self.record.steps) >= self.steps:
            raise EnoughSteps

    def step_ended(self) -> None:
        """Records the current step."""
        self.record.steps.append(self.record.end)
        self.record.end = StepRecord()

    def observe(self, model: Any, values: dict[str, Any]) -> None:
        """Records values that the script has passed to `ks.observe`."""
        if model is not None:
            self.step_begins()
        own = {name: self.array(value) for name, value in values.items()}
        has_begun = self.current.calls or self.current.losses or model is not None
        if has_begun or not self.record.steps or self.record.evaluated:
            self.current.values.update(own)
        else:  # Of the step that the update has ended.
            self.record.steps[-1].after.update(own)
        if model is not None:
            self.current.variables = self.variables_of(model)
            self.step_ended()

    @abstractmethod
    def array(self, value: Any) -> np.ndarray:
        """A copy of a tensor or a number."""

    @abstractmethod
    def variables_of(self, model: Any) -> Arrays:
        """Values of a model's variables by name."""

    def stop(self) -> None:
        """Undoes everything that is replaced in the framework."""
        for stop in reversed(self.stops):
            stop()


_recorders: list[Recorder] = []


def recorded(make: Callable[[], Recorder], train: Callable[[], Any]) -> ProcessRecord:
    """The record of a training."""
    recorder = make()
    _recorders.append(recorder)
    try:
        train()
    except EnoughSteps:
        pass
    finally:
        _recorders.remove(recorder)
        recorder.stop()
    return recorder.record


def observe(model: Any = None, **values: Any) -> None:
    """Passes values of a step to `keras-strategies verify --processes`.

    Does nothing elsewhere, so a script may always call it. Losses, gradients and
    weights of Torch and of `fit` are found without it; pass metrics, and the loss as it
    is logged.

    Args:
        model: a `keras.Model` of a custom loop, of which the variables are compared;
            the call ends a step. None for other models.
        **values: scalars or arrays by name, as they are logged.

    Example:

    >>> for x, y in loader:
    ...     loss = step(model, x, y)
    ...     ks.observe(loss=loss)
    """
    for recorder in _recorders:
        recorder.observe(model, values)


def row_checksums(arrays: list[np.ndarray]) -> list[int]:
    """A checksum of each row, of arrays with the same number of rows.

    Args:
        arrays: list of arrays of shape (rows, ...); others are left out.
    """
    with_rows = [each for each in arrays if each.ndim]
    if not with_rows:
        return []
    count = len(with_rows[0])
    own = [each for each in with_rows if len(each) == count]
    return [
        zlib.crc32(b"".join(checksum(each[i]).to_bytes(4, "little") for each in own))
        for i in range(count)
    ]
