"""State of replicas in a trace."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any

from jax import numpy as jnp

from keras_strategies.engines.jax.function.trace_state import (
    ValueOverrides,
    as_initializer,
)
from keras_strategies.keras_compat.state_scope import StatePolicy, current_policy
from keras_strategies.runtime.replica_context import ReplicaContext
from keras_strategies.runtime.replicas.collectives import ReplicaCollectives
from keras_strategies.runtime.state import run_state
from keras_strategies.runtime.state.run_state import RunState


class TracedReplicas(ReplicaCollectives):
    """Collectives of traced replicas, with the update of an optimizer."""

    @abc.abstractmethod
    def apply(
        self, gradients: list[Any], aggregate: bool, update: Callable[[list[Any]], None]
    ) -> None:
        """Sums gradients over replicas and updates the variables of all of them."""


class TracedReplicaState(RunState):
    """Values of variables on a traced replica, or on one trace of all replicas.

    Args:
        replica: the replica's context.
        copy: returns the value of a variable that is not on-read.
        local: returns the value of an on-read variable.
        replicas: the collectives of the replica.
        outer: the state around this one, on the same replica.
    """

    def __init__(
        self,
        replica: ReplicaContext,
        copy: Callable[[Any], Any],
        local: Callable[[Any, int], Any],
        replicas: TracedReplicas,
        outer: TracedReplicaState | None = None,
    ):
        super().__init__(replica, copy, local)
        self.replicas = replicas
        self._outer = outer
        # By the ids of variables, assigned values that are equal on all replicas.
        self._replicated: dict[int, Any] = {}

    def set(self, variable: Any, value: Any, replicated: bool = False) -> None:
        """Assigns a value without aggregation.

        Args:
            variable: the variable.
            value: the value on this replica.
            replicated: bool, whether it is equal on all replicas.
        """
        self._set(variable, value)
        self._replicated[id(variable)] = value if replicated else None

    def _is_set_for_all(self, variable: Any) -> bool:
        """Whether the last assignment was one of a value that is equal on all."""
        value = self._replicated.get(id(variable))
        return value is not None and value is self.updates[id(variable)][1]

    def forget_reads(self) -> None:
        """Makes the state read again what it has not assigned."""
        self._values = {
            key: value for key, value in self._values.items() if key in self.updates
        }

    def is_replicated(self, variable: Any) -> bool:
        """Whether a variable is known to have equal values on all replicas."""
        if run_state.is_local(variable):
            return False
        if id(variable) in self.updates:
            aggregated = run_state.is_aggregated(variable)
            return aggregated or self._is_set_for_all(variable)
        if self._outer is not None:
            return self._outer.is_replicated(variable)
        return True

    def nested(self, overrides: ValueOverrides) -> TracedReplicaState:
        """A state inside this one; `commit` assigns its updates here."""

        def copy(variable: Any) -> Any:
            value = overrides.get(variable)
            return self.read(variable) if value is None else value

        found = TracedReplicaState(
            self.replica, copy, lambda v, _: self.read(v), self.replicas, self
        )
        found.averages = self.averages
        return found

    def initial_value(self, value: Any, shape: Any, dtype: Any) -> tuple[Any, Any, Any]:
        return as_initializer(value, shape, dtype)

    def updated_values(self) -> list[Any]:
        """The new values, in the order of their first assignment."""
        return [jnp.asarray(value) for _, value in self.updates.values()]

    def commit(self, values: Sequence[Any]) -> None:
        """Assigns the new values in the state around this one."""
        assert self._outer is not None
        for (variable, _), value in zip(self.updates.values(), values, strict=True):
            self._outer.set(variable, value, self._is_set_for_all(variable))


class MergedState(StatePolicy):
    """Cross-replica context inside replicas: one value of each variable for all.

    Args:
        values: returns a variable's values on the replicas.
        assign: assigns a variable on all replicas.
    """

    def __init__(
        self,
        values: Callable[[Any], list[Any]],
        assign: Callable[[Any, Any], None],
    ):
        self._values = values
        self._assign = assign
        self._merged: dict[int, Any] = {}

    def read(self, variable: Any) -> Any:
        if id(variable) not in self._merged:
            values = self._values(variable)
            if values[0] is None:
                return None
            self._merged[id(variable)] = merged_value(variable, values)
        return self._merged[id(variable)]

    def assign(self, variable: Any, value: Any) -> None:
        self._merged[id(variable)] = value
        self._assign(variable, value)

    def initial_value(self, value: Any, shape: Any, dtype: Any) -> tuple[Any, Any, Any]:
        # An optimizer that is built in its first `apply` makes variables of numbers.
        return as_initializer(value, shape, dtype)


def merged_value(variable: Any, values: Sequence[Any]) -> Any:
    """A variable's value in cross-replica context, from those of replicas."""
    if len(values) == 1:
        return values[0]
    if run_state.is_local(variable):
        return run_state.cross_replica_value(variable, values)
    return run_state.merged(variable, values)


def current_replica_state() -> TracedReplicaState:
    """The state of the replica that this thread traces."""
    state = current_policy()
    assert isinstance(state, TracedReplicaState)
    return state
