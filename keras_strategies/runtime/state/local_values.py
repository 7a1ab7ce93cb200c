"""Values of on-read variables on replicas."""

from __future__ import annotations

import abc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from keras_strategies.runtime.placement import Placement
from keras_strategies.runtime.replicas.replica_set import ReplicaSet
from keras_strategies.runtime.state import run_state


class ValueStorage(abc.ABC):
    """How an engine stores the values of on-read variables."""

    @abc.abstractmethod
    def make(self, variable: Any, parts: Callable[[], list[Any]]) -> list[Any]:
        """The first values of the local replicas, as they are stored.

        Args:
            variable: the `keras.Variable`.
            parts: returns the values.
        """

    @abc.abstractmethod
    def store(self, stored: list[Any], values: Sequence[Any]) -> None:
        """Replaces stored values."""

    @abc.abstractmethod
    def load(self, stored: Any) -> Any:
        """The tensor of a stored value."""


class TensorStorage(ValueStorage):
    """Tensors.

    Args:
        placed: returns values as tensors on the devices of the replicas.
    """

    def __init__(self, placed: Callable[[Sequence[Any]], list[Any]] = list):
        self._placed = placed

    def make(self, variable: Any, parts: Callable[[], list[Any]]) -> list[Any]:
        return self._placed(parts())

    def store(self, stored: list[Any], values: Sequence[Any]) -> None:
        stored[:] = self._placed(values)

    def load(self, stored: Any) -> Any:
        return stored


class LocalValues:
    """The values of on-read variables, one for each local replica, kept between runs.

    The variable itself has the value that is read outside of `run`; an assignment there
    also sets the value of each replica.

    Args:
        replica_set: the replicas.
        placement: the devices of the local ones.
        storage: how the engine stores values.
    """

    def __init__(
        self, replica_set: ReplicaSet, placement: Placement, storage: ValueStorage
    ):
        self._replica_set = replica_set
        self._storage = storage
        self._count = len(placement.replicas)
        # By the id of the Keras variable, until it is garbage-collected.
        self._values: dict[int, list[Any]] = {}

    def get(self, variable: Any, replica_id: int) -> Any:
        """The value of one replica."""
        return self._storage.load(
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
        self._storage.store(self._of(variable), values)
        total = run_state.cross_replica_value(variable, everywhere)
        self._replica_set.primitives.assign(variable, total)

    def assigned(self, variable: Any) -> None:
        """Distributes a value that was assigned outside of `run`."""
        if id(variable) in self._values:
            self._storage.store(self._values[id(variable)], self.parts(variable))

    def parts(self, variable: Any) -> list[Any]:
        """The local replicas' parts of a variable's value."""
        first = self._replica_set.counts.first
        value = self._replica_set.primitives.read(variable)
        every = run_state.parts(variable, value, self._replica_set.counts.total)
        return every[first : first + self._count]

    def _of(self, variable: Any) -> list[Any]:
        found = self._values.get(id(variable))
        if found is None:
            found = self._values[id(variable)] = self._storage.make(
                variable, lambda: self.parts(variable)
            )
            weakref.finalize(variable, self._values.pop, id(variable), None)
        return found
