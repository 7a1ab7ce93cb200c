"""What a replica that JAX traces sees of variables, and what it leaves."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from jax import numpy as jnp

from keras_strategies import context, keras_compat
from keras_strategies.engines.jax.function.trace_scopes import ValueOverrides
from keras_strategies.runtime import run_scope
from keras_strategies.runtime.base import Communicator
from keras_strategies.runtime.run_scope import LocalValues, RunScope


class _TraceLocals(LocalValues):
    """Reads on-read values in a trace; they are written when the replicas end."""

    def __init__(self, read: Callable[[Any, int], Any]):
        self._read = read

    def get(self, variable: Any, replica_id: int) -> Any:
        return self._read(variable, replica_id)

    def commit(self, variable: Any, values: Sequence[Any]) -> None:
        raise NotImplementedError

    def assigned(self, variable: Any, value: Any) -> None:
        raise NotImplementedError


class TracedReplicas(Communicator):
    """The replicas of one run, and what all of them do together."""

    @abc.abstractmethod
    def apply(
        self, gradients: list[Any], aggregate: bool, update: Callable[[list[Any]], None]
    ) -> None:
        """Sums gradients over replicas and updates the variables of all of them."""

    @abc.abstractmethod
    def value_and_grad(
        self, loss_fn: Callable[[list[Any]], Any], values: list[Any]
    ) -> Any:
        """As `jax.value_and_grad(loss_fn, has_aux=True)(values)`."""


class ReplicaScope(RunScope):
    """What one replica, or one traced for all, sees of the variables.

    Args:
        replica: the replica's context.
        copy: gives the value of a variable that is not local.
        local: gives the value of an on-read variable.
        replicas: what the replica and the others communicate through.
        parent: the scope that this one is inside of, on the same replica.
    """

    def __init__(
        self,
        replica: context.ReplicaContext,
        copy: Callable[[Any], Any],
        local: Callable[[Any, int], Any],
        replicas: TracedReplicas,
        parent: ReplicaScope | None = None,
    ):
        super().__init__(replica, copy, _TraceLocals(local))
        self.replicas = replicas
        self._parent = parent
        # Variables that have been given one value for all replicas.
        self._agreed: set[int] = set()

    def keep(self, variable: Any, value: Any, agreed: bool = False) -> None:
        """Gives the variable a value as it is; `agreed` if all replicas have it."""
        self._set(variable, value)
        self._agreed.discard(id(variable))
        if agreed:
            self._agreed.add(id(variable))

    def add_update(self, update: tuple[Any, Any]) -> None:
        super().add_update(update)
        self._agreed.discard(id(update[0]))

    def agrees_on(self, variable: Any) -> bool:
        """Whether a variable is known to have one value on all replicas."""
        if run_scope.is_local(variable):
            return False
        if id(variable) in self.updates:
            return id(variable) in self._agreed or run_scope.is_aggregated(variable)
        if self._parent is not None:
            return self._parent.agrees_on(variable)
        return keras_compat.seed_offset(variable, 1) == 0

    def nested(self, given: ValueOverrides) -> ReplicaScope:
        """A scope inside this one, whose updates `take_over` brings out."""

        def copy(variable: Any) -> Any:
            value = given.get(variable)
            return self.get_current_value(variable) if value is None else value

        return ReplicaScope(
            self.replica,
            copy,
            lambda variable, replica_id: self.get_current_value(variable),
            self.replicas,
            parent=self,
        )

    def updated_values(self) -> list[Any]:
        """The new values, in the order of their first assignment."""
        return [jnp.asarray(value) for _, value in self.updates.values()]

    def take_over(self, inner: ReplicaScope, values: Sequence[Any]) -> None:
        """The updates of a scope inside, whose new values these are."""
        for (variable, _), value in zip(inner.updates.values(), values, strict=True):
            self.keep(variable, value, agreed=id(variable) in inner._agreed)


class MergeScope(keras.StatelessScope):
    """Cross-replica context inside replicas: one value of each variable for all.

    Args:
        values: gives a variable's values on the replicas.
        assign: gives all replicas a variable's new value.
    """

    def __init__(
        self,
        values: Callable[[Any], list[Any]],
        assign: Callable[[Any, Any], None],
    ):
        super().__init__(collect_losses=True, initialize_variables=False)
        self._values = values
        self._assign = assign

    def get_current_value(self, variable: Any) -> Any:
        if id(variable) not in self.state_mapping:
            values = self._values(variable)
            if values[0] is None:
                return None
            self.state_mapping[id(variable)] = one_value(variable, values)
        return self.state_mapping[id(variable)]

    def add_update(self, update: tuple[Any, Any]) -> None:
        super().add_update(update)
        self._assign(*update)


def one_value(variable: Any, values: Sequence[Any]) -> Any:
    """What replicas' values of a variable are in cross-replica context."""
    if len(values) == 1:
        return values[0]
    if run_scope.is_local(variable):
        return run_scope.together(variable, values)
    return run_scope.merged(variable, values)


def current_replica_scope() -> ReplicaScope:
    scope = keras_compat.current_stateless_scope()
    assert isinstance(scope, ReplicaScope)
    return scope


def with_seed_offset(variable: Any, value: Any, replica_id: Any) -> Any:
    """A seed's state, different on each replica; anything else as it is."""
    step = keras_compat.seed_offset(variable, 1)
    if value is None or not step:
        return value
    # Modulo 2^32, of which the 2^31 of `seed_offset` is a divisor.
    product = jnp.asarray(replica_id, "uint32") * np.uint32(step)
    offset = (product & np.uint32(2**31 - 1)).astype(value.dtype)
    return value.at[0].add(offset)
