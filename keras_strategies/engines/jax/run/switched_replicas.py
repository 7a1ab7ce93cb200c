"""Replicas of different numbers of rows: a branch of one program for each number.

Arguments are padded to the most rows and sharded. Each device takes its branch, in
which the padding is sliced off, and computes its replica only.

# Collectives

Devices in different branches cannot exchange anything. A function has none but the sums
of gradients in `optimizer.apply`, with which most end: the update follows the branches.
A function that exchanges something else, or uses what an update has changed, is
refused.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import jax
import keras
import numpy as np
from jax import lax
from jax import numpy as jnp

from keras_strategies.engines.jax.function.call_arguments import ReplicaArguments
from keras_strategies.engines.jax.function.refused_values import check_values
from keras_strategies.engines.jax.function.state_refs import StateRef, VariableRef
from keras_strategies.engines.jax.function.trace_state import (
    ProgramState,
    TraceState,
    is_stacked,
)
from keras_strategies.engines.jax.run.mapped_replicas import MappedReplicas, ResultLeaf
from keras_strategies.engines.jax.run.refused_functions import NotUniformError
from keras_strategies.engines.jax.run.replica_mesh import ReplicaMesh
from keras_strategies.engines.jax.run.row_numbers import rows_of_parts
from keras_strategies.engines.jax.run.traced_replica_state import (
    MergedState,
    TracedReplicaState,
    current_replica_state,
)
from keras_strategies.runtime import context
from keras_strategies.runtime.frames import merged_replicas
from keras_strategies.runtime.random_numbers.row_draws import (
    DrawsOfRun,
    OwnRows,
    drawing,
)
from keras_strategies.runtime.replicas.collectives import MergeArguments
from keras_strategies.runtime.state import run_state
from keras_strategies.types import ReduceOp
from keras_strategies.values import map_structure


@dataclass
class Branches:
    """What the branches of a function are known to do, from earlier traces.

    Args:
        refs: the state that they read.
        totals: for each branch, the Python numbers that are summed over replicas.
        shapes: for each branch, the shapes of its results; empty until known.
    """

    refs: dict[Any, StateRef] = field(default_factory=dict)
    totals: list[list[Any]] = field(default_factory=list)
    shapes: list[list[tuple[int, ...]]] = field(default_factory=list)


class _Branch:
    """A trace of the function for one number of rows.

    Args:
        number: int, the branch.
    """

    def __init__(self, number: int):
        self.number = number
        self.totals: list[Any] = []
        self.result: Any = None
        self.shapes: list[tuple[int, ...]] = []
        #: The variables that it assigns, in order.
        self.assigned: list[Any] = []
        #: For each `optimizer.apply`: whether it sums, and the update.
        self.updates: list[tuple[bool, Callable[[list[Any]], None]]] = []
        #: Values that it has assigned before them, and variables that it reads after.
        self.before: dict[int, int] = {}
        self.read_after: set[int] = set()


class SwitchedReplicas(MappedReplicas):
    """A function on replicas whose arguments differ in their numbers of rows.

    Args:
        mesh, fn, arguments: see `MappedReplicas`.
        known: what is known of its branches.
    """

    exchanges = False

    def __init__(
        self,
        mesh: ReplicaMesh,
        fn: Callable[..., Any],
        arguments: ReplicaArguments,
        known: Branches,
    ):
        super().__init__(mesh, fn, arguments, list(known.refs.values()))
        self._known = known
        columns = zip(*arguments.parts, strict=True)
        shapes = [tuple(part.shape for part in own) for own in columns]
        self._kinds = list(dict.fromkeys(shapes))
        self._branch_of = [self._kinds.index(own) for own in shapes]
        self._branches: list[_Branch] = []
        self._branch: _Branch | None = None
        self._gradients: list[list[Any]] = []

    # Around the trace.

    @property
    def is_first(self) -> bool:
        """Whether nothing is known of the branches: a trace has no results."""
        return not self._known.shapes

    def learned(self) -> Branches | None:
        """What is known after a trace; None if it was known before."""
        found = Branches(
            {**self._known.refs, **self.missing},
            [branch.totals for branch in self._branches],
            [branch.shapes for branch in self._branches],
        )
        return None if found == self._known else found

    def finish(
        self, state: TraceState, program: ProgramState, results: tuple[Any, ...]
    ) -> list[Any]:
        _, joined, values, stacks = results
        self._write(state, values, stacks)
        parts = [self._split(program, array, i) for i, array in enumerate(joined)]

        def result(replica_id: int) -> Any:
            branch = self._branch_of[replica_id]
            own = [
                part if part.shape == shape else part[tuple(map(slice, shape))]
                for part, shape in zip(
                    [each[replica_id] for each in parts],
                    self._known.shapes[branch],
                    strict=True,
                )
            ]
            leaves = self._branches[branch].result
            return map_structure(lambda leaf: leaf([], own), leaves)

        return list(map(result, range(self._mesh.count)))

    def _split(self, program: ProgramState, array: Any, index: int) -> list[Any]:
        """The components of a result, with the padding of axes other than the first."""
        shapes = self._shapes_of(index)
        rows = [shape[0] for shape in shapes if shape]
        if len(set(rows)) > 1:
            return program.split_padded(array, rows)
        return program.split(array, len(shapes), rows[:1] in ([], [0]))

    def _shapes_of(self, index: int) -> list[tuple[int, ...]]:
        """The shape of a result on each replica."""
        return [self._known.shapes[branch][index] for branch in self._branch_of]

    def _most(self) -> list[tuple[int, ...]]:
        """The shape of each result with the padding of all branches."""
        return [
            tuple(map(max, *shapes)) for shapes in zip(*self._known.shapes, strict=True)
        ]

    # Inside the trace.

    def _body(
        self, state: list[Any], replicated: list[Any], parts: list[Any]
    ) -> tuple[list[Any], ...]:
        self._take_state(state)
        replica_id = lax.axis_index(self._axis)
        self._branches = [_Branch(i) for i in range(len(self._kinds))]

        def on(branch: _Branch) -> Callable[[], Any]:
            return lambda: self._on_branch(branch, replica_id, replicated, parts)

        if self.is_first:
            for branch in self._branches:
                jax.eval_shape(on(branch))
            return [], [], [], []
        index = jnp.asarray(self._branch_of)[replica_id]
        outputs, gradients, values = lax.switch(index, [*map(on, self._branches)])
        first = self._branches[0]
        own = self._state_of(replica_id)
        for branch in self._branches:
            if [id(v) for v in branch.assigned] != [id(v) for v in first.assigned]:
                raise NotUniformError("they assign different variables")
        for variable, value in zip(first.assigned, values, strict=True):
            own.set(variable, value)
        self._apply_updates(own, gradients)
        outputs = [each[None] if is_stacked(each) else each for each in outputs]
        return ([], outputs, *self._new_state(own))

    def _on_branch(
        self,
        branch: _Branch,
        replica_id: Any,
        shared: list[Any],
        parts: list[Any],
    ) -> tuple[list[Any], list[list[Any]], list[Any]]:
        """Results, gradients and assigned values of a replica in a branch."""
        components = [
            part[0] if not shape else part[: shape[0]]
            for part, shape in zip(parts, self._kinds[branch.number], strict=True)
        ]
        args, kwargs = self._arguments.build(shared, components)
        own = self._state_of(replica_id)
        self._branch, self._gradients = branch, []
        draws = DrawsOfRun(lambda: self._rows_of(branch, replica_id))
        try:
            with context.on_replica(own.replica), own.scope(), drawing(draws):
                result = self._call(args, kwargs, self._branch_of.index(branch.number))
        finally:
            self._branch = None
        outputs: list[Any] = []

        def place(leaf: Any) -> ResultLeaf:
            outputs.append(leaf)
            number = len(outputs) - 1
            return lambda _, own: own[number]

        branch.result = self._placed(result, shared, place)
        branch.shapes = [tuple(leaf.shape) for leaf in outputs]
        if not self.is_first:
            outputs = [
                _padded_to(leaf, shape)
                for leaf, shape in zip(outputs, self._most(), strict=True)
            ]
        if branch.updates and _values(own) != branch.before:
            raise NotUniformError("the function assigns variables after an update")
        branch.assigned = [variable for variable, _ in own.updates.values()]
        return outputs, self._gradients, own.updated_values()

    def _state_of(self, replica_id: Any) -> TracedReplicaState:
        replica = self._replica(replica_id)
        return TracedReplicaState(replica, self._copied, self._local, self)

    def _copied(self, variable: Any) -> Any:
        if self._branch is not None and self._branch.updates:
            self._branch.read_after.add(id(variable))
        return self._read(VariableRef(variable))

    def _rows_of(self, branch: _Branch, replica_id: Any) -> OwnRows | None:
        rows = rows_of_parts(self._arguments.parts)
        if not rows:
            return None
        before = np.asarray([*itertools.accumulate(rows, initial=0)], "int32")
        own = rows[self._branch_of.index(branch.number)]
        return OwnRows(jnp.asarray(before)[replica_id], own, sum(rows))

    def _apply_updates(self, state: TracedReplicaState, gradients: Any) -> None:
        """Updates variables by the sums of the replicas' gradients."""
        first, *others = self._branches
        if any(len(each.updates) != len(first.updates) for each in others):
            raise NotUniformError("they apply gradients differently often")
        if len(first.updates) > 1:
            raise NotUniformError("the function applies gradients more than once")
        before = set(state.updates)
        for (sums, update), own in zip(first.updates, gradients, strict=True):
            replica = state.replica
            with context.on_replica(replica), state.scope():
                self._update(state, own, sums, update)
        touched = {id(v) for key, (v, _) in state.updates.items() if key not in before}
        read_after = set().union(*(each.read_after for each in self._branches))
        if touched & read_after or self._has_reassigned(state, before):
            raise NotUniformError("the function uses variables after their update")

    def _has_reassigned(self, state: TracedReplicaState, before: set[Any]) -> bool:
        """Whether an update has assigned what the function has assigned too."""
        return any(
            state.is_replicated(variable)
            for key, (variable, _) in state.updates.items()
            if key in before and not run_state.is_local(variable)
        )

    # Collectives.

    def total(self, replica: int, number: int | float) -> int | float:
        branch = self._branch
        assert branch is not None
        branch.totals.append(number)
        position, known = len(branch.totals), self._known.totals
        if not known or any(len(each) < position for each in known):
            return number * self._mesh.count  # Until the other branches are known.
        found: int | float = sum(known[i][position - 1] for i in self._branch_of)
        return found

    def all_reduce(
        self, replica: int, op: ReduceOp, tensors: Sequence[Any]
    ) -> Sequence[Any]:
        _refuse("all_reduce")

    def all_gather(
        self, replica: int, tensors: Sequence[Any], axis: int, are_equal: bool = False
    ) -> Sequence[Any]:
        _refuse("all_gather")

    def merge_call(
        self, replica: int, merge: Callable[..., Any], arguments: MergeArguments
    ) -> Any:
        # What needs no value of a replica, as the building of an optimizer, is the same
        # in all branches.
        values = MergedState(_no_value, _no_value)
        with merged_replicas(self._mesh.strategy), values.scope():
            result = merge(*arguments[0], **arguments[1])
        check_values([arguments, result])
        leaves = keras.tree.flatten([arguments, result])
        if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            _refuse("merge_call")
        return result

    def apply(
        self, gradients: list[Any], aggregate: bool, update: Callable[[list[Any]], None]
    ) -> None:
        branch = self._branch
        assert branch is not None
        branch.updates.append((aggregate, update))
        state = current_replica_state()
        branch.before = _values(state)
        # Values before the update: a read after it is noted.
        state.forget_reads()
        self._gradients.append(gradients)


def _values(state: TracedReplicaState) -> dict[int, int]:
    """The ids of values of the variables that replicas share, by those of these."""
    return {
        id(variable): id(value)
        for variable, value in state.updates.values()
        if not run_state.is_local(variable)
    }


def _no_value(*of_variable: Any) -> NoReturn:
    _refuse("merge_call")


def _refuse(name: str) -> NoReturn:
    raise NotUniformError(f"the function calls `{name}`, or a layer in it does")


def _padded_to(array: Any, shape: tuple[int, ...]) -> Any:
    """An array with zeros at the end of each axis, up to a shape."""
    if array.ndim != len(shape):
        raise NotUniformError("they return values of different ranks")
    missing = [(0, most - size) for size, most in zip(array.shape, shape, strict=True)]
    return jnp.pad(array, missing) if any(n for _, n in missing) else array
