"""Variables of custom loops of elastic workers."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import numpy as np

from keras_strategies.errors import WorkerError
from keras_strategies.keras_compat.strategy_attribute import strategy_of
from keras_strategies.keras_compat.variables.values import raw_value
from keras_strategies.runtime.state.model_values import copied_value


class LoopVariables:
    """The variables that were created under elastic strategies.

    Numbered in the order of creation, which is the same on all workers, since these run
    the same script.
    """

    def __init__(self) -> None:
        self._references: dict[int, weakref.ref[Any]] = {}
        self._count = 0

    def add(self, variable: Any) -> None:
        """Adds a variable that has been created."""
        self._references[self._count] = weakref.ref(variable)
        self._count += 1

    def alive(self) -> dict[int, Any]:
        """The variables that exist, by their numbers."""
        found = {number: ref() for number, ref in self._references.items()}
        return {n: v for n, v in found.items() if v is not None}

    def weights(self) -> list[Any]:
        """Copies of the values of trainable variables."""
        return [copied_value(v) for v in self._with_values() if v.trainable]

    def have_changed(self, weights: list[Any]) -> bool:
        """Whether trainable variables have other values than `weights` returned."""
        now = self.weights()
        return len(now) == len(weights) and not all(map(np.array_equal, now, weights))

    def _with_values(self) -> Iterable[Any]:
        return (v for v in self.alive().values() if raw_value(v) is not None)

    def capture(self) -> dict[str, Any]:
        """The values of all variables, on the host."""
        found = self.alive().items()
        return {
            str(number): {
                "path": variable.path,
                "value": copied_value(variable),
                "synced": variable in strategy_of(variable).synced_variables,
            }
            for number, variable in found
            if raw_value(variable) is not None
        }

    def receive(self, state: dict[str, Any]) -> None:
        """Assigns what `capture` returned on another worker.

        Raises:
            WorkerError: if this worker has not created the same variables.
        """
        alive = self.alive()
        for number, each in ((int(key), each) for key, each in state.items()):
            variable = alive.get(number)
            if variable is None and number < self._count:
                continue  # It was garbage-collected here.
            value = each["value"]
            if variable is None or tuple(variable.shape) != value.shape:
                own = "none" if variable is None else f"{variable.path!r}"
                raise WorkerError(
                    "This worker cannot join: the others have created variable "
                    f"{each['path']!r} of shape {value.shape}, and this one {own} in "
                    "its place. Create all variables before the loop, in the same "
                    "order on all workers: build models, and optimizers with "
                    "`optimizer.build(model.trainable_variables)`."
                )
            variable.assign(value)
            synced = strategy_of(variable).synced_variables
            (synced.add if each["synced"] else synced.discard)(variable)
