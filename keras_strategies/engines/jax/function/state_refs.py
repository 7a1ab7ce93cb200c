"""References to state that compiled programs read and write."""

from __future__ import annotations

import abc
from typing import Any

import jax
from jax import numpy as jnp

from keras_strategies.engines.jax.array_placement import put_one
from keras_strategies.keras_compat.strategy_attribute import strategy_of
from keras_strategies.keras_compat.variables.values import (
    IdMap,
    raw_value,
    set_raw_value,
)
from keras_strategies.runtime.drivers import RunDriver
from keras_strategies.runtime.state import run_state


class StateRef(abc.ABC):
    """Reference to one array of state."""

    def __init__(self, variable: Any):
        self.variable = variable

    @property
    @abc.abstractmethod
    def key(self) -> Any:
        """Equal for references to the same state."""

    @abc.abstractmethod
    def spec(self) -> jax.ShapeDtypeStruct | None:
        """The array's shape and dtype; None before the variable has a value."""

    @abc.abstractmethod
    def get(self) -> jax.Array:
        """The array, made if it does not exist; not in a trace."""

    @abc.abstractmethod
    def set(self, value: jax.Array) -> None: ...


class VariableRef(StateRef):
    """Reference to the value of a variable."""

    @property
    def key(self) -> Any:
        return id(self.variable)

    def spec(self) -> jax.ShapeDtypeStruct | None:
        raw = raw_value(self.variable)
        return None if raw is None else jax.ShapeDtypeStruct(raw.shape, raw.dtype)

    def get(self) -> jax.Array:
        return raw_value(self.variable)

    def set(self, value: jax.Array) -> None:
        set_raw_value(self.variable, value)


class OnReadValues:
    """Replica values of on-read variables, stacked.

    A variable's values are one array of shape `(replicas, ...)`, sharded over the
    replicas' devices. It is made from the variable's value at the first read in `run`,
    and dropped when the variable is assigned outside of `run`.

    Args:
        count: int, the number of replicas.
        split: the sharding of an array with the replicas as first axis.
    """

    def __init__(self, count: int, split: jax.sharding.Sharding):
        self.count = count
        self._split = split
        self._stacks: IdMap[jax.Array] = IdMap()

    def get(self, variable: Any) -> jax.Array:
        stack = self._stacks.get(variable)
        if stack is None:
            parts = self.parts(variable, raw_value(variable))
            stack = put_one(parts, self._split)
            self._stacks.set(variable, stack)
        return stack

    def set(self, variable: Any, stack: jax.Array) -> None:
        self._stacks.set(variable, stack)

    def drop(self, variable: Any) -> None:
        self._stacks.discard(variable)

    def parts(self, variable: Any, value: Any) -> jax.Array:
        """The stacked replica values of a variable assigned outside of `run`."""
        return jnp.stack(run_state.parts(variable, jnp.asarray(value), self.count))


class OnReadRef(StateRef):
    """Reference to the values of an on-read variable on all replicas."""

    def __init__(self, variable: Any, stacks: OnReadValues):
        super().__init__(variable)
        self._stacks = stacks

    @property
    def key(self) -> Any:
        return (id(self.variable), "local")

    def spec(self) -> jax.ShapeDtypeStruct | None:
        raw = raw_value(self.variable)
        if raw is None:
            return None
        return jax.ShapeDtypeStruct((self._stacks.count, *raw.shape), raw.dtype)

    def get(self) -> jax.Array:
        return self._stacks.get(self.variable)

    def set(self, value: jax.Array) -> None:
        self._stacks.set(self.variable, value)


class ProgramDriver(RunDriver):
    """What programs need to know of a strategy with variables."""

    @property
    @abc.abstractmethod
    def program_sharding(self) -> Any:
        """`ProgramSharding` of programs that use the strategy's variables."""

    @property
    @abc.abstractmethod
    def on_read_values(self) -> OnReadValues | None:
        """The replica values of on-read variables; None with one replica."""


def on_read_values_of(variable: Any) -> OnReadValues | None:
    """The store of an on-read variable's values; None for another variable."""
    strategy = strategy_of(variable)
    if strategy is None or not run_state.is_local(variable):
        return None
    driver = strategy.drivers.run
    assert isinstance(driver, ProgramDriver)
    return driver.on_read_values
