"""Scopes of traces: they note which refs a function reads and assigns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import keras
from jax import numpy as jnp

from keras_strategies import keras_compat
from keras_strategies.engines.jax import jax_compat
from keras_strategies.engines.jax.function.state_refs import (
    OnReadRef,
    StateRef,
    VariableRef,
    on_read_values_of,
)
from keras_strategies.runtime.run_scope import RunScope

if TYPE_CHECKING:
    from keras_strategies.strategies.base import Strategy


# Traces of one call, after which a function is refused. One or two find its state.
MAX_TRACES = 100


class ValueOverrides:
    """Values of variables that a scope has in place of those around it.

    Args:
        variables: sequence of variables.
        values: their values.
    """

    def __init__(self, variables: Sequence[Any] = (), values: Sequence[Any] = ()):
        self._values = {id(v): x for v, x in zip(variables, values, strict=True)}
        # The variables that were asked for, by id.
        self.read: set[int] = set()

    def get(self, variable: Any) -> Any:
        if id(variable) in self._values:
            self.read.add(id(variable))
        return self._values.get(id(variable))


class TraceScope(keras.StatelessScope):
    """State inside of a trace, in cross-replica context.

    Args:
        parent: the scope around this one, which is asked for what this one does not
            hold; None to read variables themselves.
        given: what is not to be looked up there.
    """

    def __init__(
        self, parent: keras.StatelessScope | None, given: ValueOverrides | None = None
    ):
        super().__init__(collect_losses=True, initialize_variables=False)
        self._parent = parent
        self._given = given or ValueOverrides()
        self._values: dict[Any, Any] = {}
        self.reads: dict[Any, StateRef] = {}
        self.written: dict[Any, StateRef] = {}

    def read(self, ref: StateRef) -> Any:
        """The value of a ref; None if its variable has none yet."""
        value = self._values.get(ref.key)
        if value is None:
            value = self._read_outside(ref)
            if value is not None:
                self._values[ref.key] = value
                self.reads[ref.key] = ref
        return value

    def _read_outside(self, ref: StateRef) -> Any:
        if isinstance(ref, VariableRef):
            given = self._given.get(ref.variable)
            if given is not None:
                return given
        if isinstance(self._parent, TraceScope):
            return self._parent.read(ref)
        if self._parent is not None and isinstance(ref, VariableRef):
            found = self._parent.get_current_value(ref.variable)
            if found is not None:
                return found
        return None if ref.spec() is None else ref.get()

    def write(self, ref: StateRef, value: Any) -> None:
        self._values[ref.key] = value
        self.written[ref.key] = ref

    def value(self, ref: StateRef) -> Any:
        return self._values[ref.key]

    def get_current_value(self, variable: Any) -> Any:
        return self.read(VariableRef(variable))

    def add_update(self, update: tuple[Any, Any]) -> None:
        variable, value = update
        self.write(VariableRef(variable), value)
        stacks = on_read_values_of(variable)
        if stacks is not None:
            self.write(OnReadRef(variable, stacks), stacks.parts(variable, value))

    def updated_values(self) -> list[Any]:
        """The new values, in the order of their first assignment."""
        return [jnp.asarray(self._values[key]) for key in self.written]

    def commit(self, values: Sequence[Any]) -> None:
        """Gives the scope around this one, or the variables, the new values."""
        for ref, value in zip(self.written.values(), values, strict=True):
            if isinstance(self._parent, TraceScope):
                self._parent.write(ref, value)
            elif not isinstance(ref, VariableRef):
                ref.set(value)
            elif self._parent is not None:
                self._parent.add_update((ref.variable, value))
            else:
                ref.variable.assign(value)

    @property
    def root(self) -> ProgramScope | None:
        """The scope of the program that is being traced."""
        return self._parent.root if isinstance(self._parent, TraceScope) else None


class ProgramScope(TraceScope):
    """The outermost state of a program that is being traced.

    Args:
        known: the refs that the program has as inputs, and their values there.
        sees_all: bool, whether values of replicas have a component for each replica
            of all workers.
    """

    def __init__(self, known: Iterable[tuple[StateRef, Any]], sees_all: bool = False):
        super().__init__(None)
        self.sees_all = sees_all
        for ref, value in known:
            self._values[ref.key] = value
        self.missing: dict[Any, StateRef] = {}
        self.strategies: dict[int, Strategy] = {}
        self._origins: dict[tuple[int, ...], tuple[list[Any], Any]] = {}

    def _read_outside(self, ref: StateRef) -> Any:
        found = ref.spec()
        if found is None:
            return None
        self.missing[ref.key] = ref
        return jnp.zeros(found.shape, found.dtype)

    @property
    def root(self) -> ProgramScope:
        return self

    def split(self, array: Any, count: int, stacked: bool) -> list[Any]:
        """The replicas' parts of an array, which `joined` will recognize."""
        parts = [array[i] for i in range(count)] if stacked else jnp.split(array, count)
        self._origins[tuple(map(id, parts))] = (parts, array)
        return parts

    def joined(self, parts: Sequence[Any]) -> Any:
        """One array of the replicas' parts, which have one shape."""
        found = self._origins.get(tuple(map(id, parts)))
        if found is not None:
            return found[1]
        parts = [jnp.asarray(part) for part in parts]
        return jnp.stack(parts) if is_stacked(parts[0]) else jnp.concatenate(parts)


def is_stacked(part: Any) -> bool:
    """Whether parts like this one are joined along an axis of their own."""
    return len(part.shape) == 0 or part.shape[0] == 0


class MissingStateError(Exception):
    """A trace has met state that it did not have as an input."""

    def __init__(self, scope: ProgramScope):
        super().__init__("state was found while tracing")
        self.scope = scope


class AllReplicasNeededError(BaseException):
    """A trace without other workers' values has met a strategy that has workers.

    It is traced again with them. A `BaseException`, since the user's code is between
    here and there.
    """

    def __init__(self, strategy: Strategy):
        super().__init__("workers were found while tracing")
        self.strategy = strategy


def check_sees_all(root: ProgramScope, strategy: Strategy) -> None:
    """Ends a trace that does not have the values of all of a strategy's replicas."""
    if strategy.workers is not None and not root.sees_all:
        raise AllReplicasNeededError(strategy)


def in_trace() -> bool:
    """Whether this thread is tracing, so that there is nothing to compile."""
    scope = keras_compat.current_stateless_scope()
    return scope is not None or jax_compat.is_tracing()


def sees_all_replicas(strategy: Strategy) -> bool:
    """Whether a program is traced that has the values of all of its replicas."""
    scope = keras_compat.current_stateless_scope()
    root = scope.root if isinstance(scope, TraceScope) else None
    if root is None:
        return False
    check_sees_all(root, strategy)
    return True


def initial_value(value: Any, shape: Any, dtype: Any) -> tuple[Any, Any, Any]:
    """An initializer for a value; in a program, variables get theirs after the trace.

    Keras refuses values there. One that is computed in the program is left to it.
    """
    scope = keras_compat.current_stateless_scope()
    if not isinstance(scope, (TraceScope, RunScope)):
        return value, shape, dtype
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(value)):
        return value, shape, dtype
    found = jax.eval_shape(lambda: keras.ops.convert_to_tensor(value, dtype))

    def initializer(shape: Any, dtype: Any = None) -> Any:
        return keras.ops.convert_to_tensor(value, dtype)

    return initializer, found.shape, found.dtype.name
