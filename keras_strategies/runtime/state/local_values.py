"""Values of on-read variables on replicas."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from keras_strategies.runtime.placement import Placement
from keras_strategies.runtime.replicas.replica_set import ReplicaSet
from keras_strategies.runtime.state import run_state


class LocalValues:
    """The values of on-read variables, one for each local replica, kept between runs.

    The variable itself has the value that is read outside of `run`; an assignment there
    also sets the value of each replica.

    Args:
        replica_set: the replicas.
        placement: the devices of the local ones.
    """

    def __init__(self, replica_set: ReplicaSet, placement: Placement):
        self._replica_set = replica_set
        self._count = len(placement.replicas)
        # By the id of the Keras variable, until it is garbage-collected.
        self._values: dict[int, list[Any]] = {}

    def get(self, variable: Any, replica_id: int) -> Any:
        """The value of one replica."""
        return self.load(
            self._of(variable)[replica_id - self._replica_set.counts.first]
        )

    def commit(
        self, variable: Any, values: Sequence[Any], everywhere: Sequence[Any]
    ) -> None:
        """Stores new values, and their aggregate in the variable.

        Args:
            variable: `keras.Variable`.
            values: those of the local replicas.
            everywhere: those of all replicas, on the variable's device.
        """
        self.store(self._of(variable), values)
        total = run_state.cross_replica_value(variable, everywhere)
        self._replica_set.primitives.assign(variable, total)

    def assigned(self, variable: Any) -> None:
        """Distributes a value that was assigned outside of `run`."""
        if id(variable) in self._values:
            self.store(self._values[id(variable)], self.parts(variable))

    def parts(self, variable: Any) -> list[Any]:
        """The local replicas' parts of a variable's value."""
        first = self._replica_set.counts.first
        value = self._replica_set.primitives.read(variable)
        every = run_state.parts(variable, value, self._replica_set.counts.total)
        return every[first : first + self._count]

    def _of(self, variable: Any) -> list[Any]:
        found = self._values.get(id(variable))
        if found is None:
            found = self._values[id(variable)] = self.make(variable)
            weakref.finalize(variable, self._values.pop, id(variable), None)
        return found

    # How an engine stores values.

    def make(self, variable: Any) -> list[Any]:
        """The replicas' first values, as they are stored."""
        stored: list[Any] = [None] * self._count
        self.store(stored, self.parts(variable))
        return stored

    def store(self, stored: list[Any], values: Sequence[Any]) -> None:
        """Replaces stored values."""
        stored[:] = values

    def load(self, stored: Any) -> Any:
        """The tensor of a stored value."""
        return stored
