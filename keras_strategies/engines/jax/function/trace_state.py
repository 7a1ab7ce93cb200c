"""State in traces: the refs that a function reads and assigns."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import keras
from jax import numpy as jnp

from keras_strategies.engines.jax import compat
from keras_strategies.engines.jax.function.state_refs import (
    OnReadRef,
    StateRef,
    VariableRef,
    on_read_values_of,
)
from keras_strategies.engines.jax.padded_rows import with_zeros
from keras_strategies.keras_compat.state_scope import (
    StatePolicy,
    current_policy,
    policy_of,
)
from keras_strategies.keras_compat.thread_state import current_stateless_scope

if TYPE_CHECKING:
    from keras_strategies.runtime.engine import StrategyCore


# Maximum number of traces of one call. One or two find a function's state; after this
# many, an error is raised.
MAX_TRACES = 100


class ValueOverrides:
    """Values of variables in place of those of the scope around a trace.

    Args:
        variables: sequence of variables.
        values: their values.
    """

    def __init__(self, variables: Sequence[Any] = (), values: Sequence[Any] = ()):
        self._values = {id(v): x for v, x in zip(variables, values, strict=True)}
        # The ids of the variables that were read.
        self.read: set[int] = set()

    def get(self, variable: Any) -> Any:
        if id(variable) in self._values:
            self.read.add(id(variable))
        return self._values.get(id(variable))


class TraceState(StatePolicy):
    """State in a trace, in cross-replica context."""

    patches = ("custom loops", "replicas")

    def __init__(self) -> None:
        self._values: dict[Any, Any] = {}
        #: The keys of the refs that the trace has read, after assignments too.
        self.used: set[Any] = set()
        #: The refs whose values are those of the outside.
        self.reads: dict[Any, StateRef] = {}
        self.written: dict[Any, StateRef] = {}

    @property
    @abc.abstractmethod
    def program(self) -> ProgramState | None:
        """The state of the program that is being traced; None outside of one."""

    @abc.abstractmethod
    def _read_outside(self, ref: StateRef) -> Any:
        """The value of a ref that the trace has not read; None if it has none yet."""

    def read(self, variable: Any) -> Any:
        return self.read_ref(VariableRef(variable))

    def assign(self, variable: Any, value: Any) -> None:
        self.write_ref(VariableRef(variable), value)
        stacks = on_read_values_of(variable)
        if stacks is not None:
            self.write_ref(OnReadRef(variable, stacks), stacks.parts(variable, value))

    def initial_value(self, value: Any, shape: Any, dtype: Any) -> tuple[Any, Any, Any]:
        return as_initializer(value, shape, dtype)

    def read_ref(self, ref: StateRef) -> Any:
        """The value of a ref; None if its variable has none yet."""
        self.used.add(ref.key)
        value = self._values.get(ref.key)
        if value is None:
            value = self._read_outside(ref)
            if value is not None:
                self._values[ref.key] = value
                self.reads[ref.key] = ref
        return value

    def write_ref(self, ref: StateRef, value: Any) -> None:
        """Assigns the state of a ref."""
        self._values[ref.key] = value
        self.written[ref.key] = ref

    def value(self, ref: StateRef) -> Any:
        """The value of a ref that was read or written."""
        return self._values[ref.key]

    def updated_values(self) -> list[Any]:
        """The new values, in the order of their first assignment."""
        return [jnp.asarray(self._values[key]) for key in self.written]


class NestedState(TraceState):
    """The state of a trace inside a scope, of which it reads what it has not assigned.

    Args:
        outer: the scope around the trace; None to read variables themselves.
        overrides: values in place of those of `outer`.
    """

    def __init__(self, outer: keras.StatelessScope | None, overrides: ValueOverrides):
        super().__init__()
        self._outer = outer
        self._overrides = overrides

    @property
    def _outer_trace(self) -> TraceState | None:
        policy = policy_of(self._outer)
        return policy if isinstance(policy, TraceState) else None

    @property
    def program(self) -> ProgramState | None:
        return None if self._outer_trace is None else self._outer_trace.program

    def _read_outside(self, ref: StateRef) -> Any:
        if isinstance(ref, VariableRef):
            value = self._overrides.get(ref.variable)
            if value is not None:
                return value
        if self._outer_trace is not None:
            return self._outer_trace.read_ref(ref)
        if self._outer is not None and isinstance(ref, VariableRef):
            value = self._outer.get_current_value(ref.variable)
            if value is not None:
                return value
        return None if ref.spec() is None else ref.get()

    def commit(self, values: Sequence[Any]) -> None:
        """Assigns the new values in the scope around, or to the variables."""
        for ref, value in zip(self.written.values(), values, strict=True):
            if self._outer_trace is not None:
                self._outer_trace.write_ref(ref, value)
            elif not isinstance(ref, VariableRef):
                ref.set(value)
            elif self._outer is not None:
                self._outer.add_update((ref.variable, value))
            else:
                ref.variable.assign(value)


class ProgramState(TraceState):
    """The state of a program that is being traced: its inputs and outputs.

    Args:
        known: the refs that are inputs of the program, and their traced values.
        sees_all: bool, whether distributed values have the components of all workers'
            replicas.
    """

    def __init__(self, known: Iterable[tuple[StateRef, Any]], sees_all: bool = False):
        super().__init__()
        self.sees_all = sees_all
        for ref, value in known:
            self._values[ref.key] = value
        self.missing: dict[Any, StateRef] = {}
        self.strategies: dict[int, StrategyCore] = {}
        # By the ids of components, these and the array that they are parts of.
        self._origins: dict[tuple[int, ...], tuple[list[Any], Any]] = {}

    def _read_outside(self, ref: StateRef) -> Any:
        found = ref.spec()
        if found is None:
            return None
        self.missing[ref.key] = ref
        return jnp.zeros(found.shape, found.dtype)

    @property
    def program(self) -> ProgramState:
        return self

    def split(self, array: Any, count: int, stacked: bool) -> list[Any]:
        """The replicas' components of an array; `joined` is the inverse."""
        parts = [array[i] for i in range(count)] if stacked else jnp.split(array, count)
        self._origins[tuple(map(id, parts))] = (parts, array)
        return parts

    def joined(self, parts: Sequence[Any]) -> Any:
        """One array of the replicas' components, padded if they differ in rows."""
        found = self._origins.get(tuple(map(id, parts)))
        if found is not None:
            return found[1]
        parts = [jnp.asarray(part) for part in parts]
        if len({part.shape for part in parts}) > 1:
            most = max(part.shape[0] for part in parts)
            parts = [with_zeros(part, most - part.shape[0]) for part in parts]
        return jnp.stack(parts) if is_stacked(parts[0]) else jnp.concatenate(parts)

    def split_padded(self, array: Any, rows: Sequence[int]) -> list[Any]:
        """The components of an array with padding, of which each has so many rows."""
        most = array.shape[0] // len(rows)
        starts = range(0, array.shape[0], most)
        parts = [array[i : i + own] for i, own in zip(starts, rows, strict=True)]
        self._origins[tuple(map(id, parts))] = (parts, array)
        return parts


def is_stacked(part: Any) -> bool:
    """Whether components of this shape are joined along a new axis."""
    return len(part.shape) == 0 or part.shape[0] == 0


class MissingStateError(Exception):
    """A trace read, created or assigned state that the program does not have."""

    def __init__(self, state: ProgramState):
        super().__init__("state was found while tracing")
        self.state = state


class AllReplicasNeededError(BaseException):
    """A trace without the values of other workers used a strategy with workers.

    The function is traced again with them. A `BaseException`, so that the user's code
    does not catch it.
    """

    def __init__(self, strategy: StrategyCore):
        super().__init__("workers were found while tracing")
        self.strategy = strategy


def current_program() -> ProgramState | None:
    """The program that this thread traces, in cross-replica context; or None."""
    policy = current_policy()
    return policy.program if isinstance(policy, TraceState) else None


def check_sees_all(program: ProgramState, strategy: StrategyCore) -> None:
    """Ends a trace that lacks the values of some of a strategy's replicas."""
    if strategy.workers is not None and not program.sees_all:
        raise AllReplicasNeededError(strategy)


def in_trace() -> bool:
    """Whether this thread is in a trace."""
    scope = current_stateless_scope()
    return scope is not None or compat.is_tracing()


def sees_all_replicas(strategy: StrategyCore) -> bool:
    """Whether the program in trace has the values of all of a strategy's replicas."""
    program = current_program()
    if program is None:
        return False
    check_sees_all(program, strategy)
    return True


def as_initializer(value: Any, shape: Any, dtype: Any) -> tuple[Any, Any, Any]:
    """The initial value of a variable that is made in a trace, as an initializer.

    Keras accepts only initializers in a trace, after which it initializes the
    variables. For a traced value it raises an error.
    """
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(value)):
        return value, shape, dtype
    found = jax.eval_shape(lambda: keras.ops.convert_to_tensor(value, dtype))

    def initializer(shape: Any, dtype: Any = None) -> Any:
        return keras.ops.convert_to_tensor(value, dtype)

    return initializer, found.shape, found.dtype.name
