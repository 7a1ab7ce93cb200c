"""State of a replica in `Strategy.run`: reads and assignments of variables.

In replica context the arguments of a variable define its behavior, as in
`tf.distribute`:

- `synchronization="on_read"` (metrics): each replica has a separate value, which
  persists between runs; outside of `run` the aggregate is read.
- an `aggregation`: an assignment is a collective, and all replicas continue with the
  sum, the mean or the first replica's value. `assign_add` and `assign_sub` aggregate
  the increments, not the results.
- neither: assignments are local to the replica until the run ends. Then floats are
  averaged, which keeps equal values, and others are those of the first replica.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import keras

from keras_strategies.errors import ContextError, InvalidArgumentError
from keras_strategies.keras_compat.state_scope import StatePolicy, policy_of
from keras_strategies.keras_compat.strategy_attribute import strategy_of
from keras_strategies.keras_compat.thread_state import current_stateless_scope
from keras_strategies.keras_compat.variables.strategy_variables import (
    set_variable_strategy,
)
from keras_strategies.runtime.replica_context import ReplicaContext


def is_local(variable: Any) -> bool:
    """Whether each replica has a value of its own."""
    return bool(variable.synchronization == "on_read")


def is_aggregated(variable: Any) -> bool:
    """Whether an assignment is a collective of the replicas."""
    return not is_local(variable) and variable.aggregation not in (None, "none")


def cross_replica_value(variable: Any, values: Sequence[Any]) -> Any:
    """The aggregate of an on-read variable in cross-replica context."""
    if variable.aggregation == "sum":
        terms = [_number(value, variable) for value in values]
        return keras.ops.cast(sum(terms[1:], start=terms[0]), variable.dtype)
    if variable.aggregation == "mean":
        wide = [keras.ops.cast(value, _mean_dtype(variable)) for value in values]
        total = sum(wide[1:], start=wide[0])
        return keras.ops.cast(total / len(values), variable.dtype)
    return values[0]


def parts(variable: Any, value: Any, count: int) -> list[Any]:
    """The replicas' values of an on-read variable that is assigned outside of `run`."""
    if variable.aggregation == "sum":
        # The first holds the total: exact for integers and floats alike.
        return [value, *(keras.ops.zeros_like(value) for _ in range(count - 1))]
    return [value] * count


class CreatedVariables:
    """Variables created by the replicas of one run: each once, for all replicas.

    One replica runs at a time, so that the others find and use the variables that the
    first one has created and stored.
    """

    def __init__(self) -> None:
        self._makers: dict[Any, tuple[int, str]] = {}

    def add(self, variable: Any, replica_id: int) -> None:
        """Called after a replica has created a variable.

        Raises:
            ContextError: if another replica created one of the same shape and dtype.
        """
        kind = (tuple(variable.shape), variable.dtype)
        maker, path = self._makers.setdefault(kind, (replica_id, variable.path))
        if maker != replica_id:
            raise ContextError(
                f"Replica {maker} created variable {path!r} in `run`, and replica "
                f"{replica_id} created another one, {variable.path!r}, of the same "
                f"shape {kind[0]} and dtype {kind[1]}. {CREATE_ONCE}"
            )


CREATE_ONCE = (
    "Create variables, layers, metrics and optimizers once for all replicas and "
    "runs: in `with strategy.scope():` before `run`, or in the first run only (`if "
    "self.counter is None: self.counter = keras.Variable(0.0)`)."
)


class Averages:
    """Means over the rows of a replica, and their gradients; see `averaged_losses`."""

    def __init__(self) -> None:
        # With the tensors, so that no other one has their ids.
        self._means: dict[int, Any] = {}
        self._gradients: dict[int, tuple[Any, str]] = {}
        #: Whether the loss that was differentiated last is one of the means.
        self.differentiated = False

    def note(self, value: Any) -> None:
        self._means[id(value)] = value

    def has(self, value: Any) -> bool:
        return id(value) in self._means

    def note_gradient(self, gradient: Any, line: str) -> None:
        self._gradients[id(gradient)] = gradient, line

    def line_of(self, gradient: Any) -> str | None:
        """Where the gradient of a mean was computed; None for other gradients."""
        return self._gradients.get(id(gradient), (None, None))[1]


class CopyRecord(Protocol):
    """Record of the copies of variables that a replica computes with."""

    def copied(self, variable: Any, value: Any) -> Any:
        """Records a copy of a variable and returns it."""


class RunState(StatePolicy):
    """Values of variables on one replica during a `run`.

    Args:
        replica: the replica's context.
        copy: returns the value of a variable on this replica's device; None to read
            the variable itself.
        local: returns the value of an on-read variable on a replica.
        made: the variables created by the replicas of the run; None if that is checked
            elsewhere.
        assigned: `assigned(variable, value)` returns the value that the replica reads
            after assigning `value`; None for `value` itself.
        record: receives the copies of variables; None where nothing is left on them.
    """

    patches = ("custom loops", "replicas")

    def __init__(
        self,
        replica: ReplicaContext,
        copy: Callable[[Any], Any],
        local: Callable[[Any, int], Any],
        made: CreatedVariables | None = None,
        assigned: Callable[[Any, Any], Any] | None = None,
        record: CopyRecord | None = None,
    ):
        self.replica = replica
        self.made = made
        self.record = record
        self.averages = Averages()
        self._copy = copy
        self._local = local
        self._assigned = assigned
        self.updates: dict[int, tuple[Any, Any]] = {}
        self._values: dict[int, Any] = {}
        self._read: dict[int, Any] = {}

    def variables_read(self) -> list[Any]:
        """The variables that the replica has read."""
        return list(self._read.values())

    def read(self, variable: Any) -> Any:
        value = self._values.get(id(variable))
        if value is None:
            if is_local(variable):
                # Created outside of any scope: later assignments outside of `run`
                # must update the values of replicas.
                if strategy_of(variable) is None:
                    set_variable_strategy(variable, self.replica.strategy)
                value = self._local(variable, self.replica.replica_id_in_sync_group)
            else:
                value = self._copy(variable)
                if self.record is not None:
                    value = self.record.copied(variable, value)
            if value is not None:
                self._values[id(variable)] = value
                self._read[id(variable)] = variable
        return value

    def assign(self, variable: Any, value: Any) -> None:
        if is_aggregated(variable):
            value = self._aggregate(variable, value)
        elif variable.synchronization == "on_write" and not is_local(variable):
            raise InvalidArgumentError(
                f"Variable {variable.path!r} is synchronized on write and has the "
                "aggregation 'none', so values assigned by replicas cannot be "
                "combined. Create it with aggregation='sum', 'mean' or "
                "'only_first_replica'."
            )
        self._set(variable, value)

    def add(self, variable: Any, delta: Any) -> Any:
        """Adds to a variable; with an aggregation, the increments are aggregated."""
        old = keras.ops.convert_to_tensor(variable)
        delta = keras.ops.cast(keras.ops.convert_to_tensor(delta), variable.dtype)
        if is_aggregated(variable):
            delta = self._aggregate(variable, delta)
            value = old + delta
            self._set(variable, value)
        else:
            value = old + delta
            self.assign(variable, value)
        return value

    def forget(self, variables: Sequence[Any]) -> None:
        """Drops values of variables that were changed outside of the replicas."""
        for variable in variables:
            self._values.pop(id(variable), None)
            self.updates.pop(id(variable), None)

    def _set(self, variable: Any, value: Any) -> None:
        if self._assigned is not None:
            value = self._assigned(variable, value)
        if self.record is not None:
            value = self.record.copied(variable, value)
        self._values[id(variable)] = value
        self.updates[id(variable)] = (variable, value)

    def _aggregate(self, variable: Any, value: Any) -> Any:
        if self.replica.num_replicas_in_sync == 1:
            return value
        if variable.aggregation == "mean":
            mean = self.replica.all_reduce(
                "SUM", keras.ops.cast(value, _mean_dtype(variable))
            )
            return keras.ops.cast(
                mean / self.replica.num_replicas_in_sync, variable.dtype
            )
        value = _number(value, variable)
        if variable.aggregation == "only_first_replica":
            is_first = keras.ops.equal(self.replica.replica_id_in_sync_group, 0)
            value = keras.ops.where(is_first, value, keras.ops.zeros_like(value))
        total = self.replica.all_reduce("SUM", value)
        return keras.ops.cast(total, variable.dtype)


def enclosing() -> RunState | None:
    """The innermost `RunState`, also around scopes that Keras opened; or None."""
    scope = current_stateless_scope()
    while scope is not None:
        policy = policy_of(scope)
        if isinstance(policy, RunState):
            return policy
        scope = scope.original_scope
    return None


def _number(value: Any, variable: Any) -> Any:
    """A value that can be summed: frameworks do not agree on sums of `bool`."""
    return keras.ops.cast(value, "int32") if variable.dtype == "bool" else value


def _mean_dtype(variable: Any) -> str:
    return variable.dtype if variable.dtype in ("float32", "float64") else "float32"


def merged(variable: Any, values: Sequence[Any]) -> Any:
    """The value that a variable without aggregation has after a run."""
    first = values[0]
    if "float" in variable.dtype and not is_aggregated(variable):
        wide = [keras.ops.cast(value, _mean_dtype(variable)) for value in values]
        moves = [(value - wide[0]) / len(values) for value in wide[1:]]
        return keras.ops.cast(sum(moves, start=wide[0]), variable.dtype)
    return first
