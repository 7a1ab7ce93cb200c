"""Replicas under `jax.shard_map`: one trace, which each device runs on its shard."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp

from keras_strategies import context
from keras_strategies.engines.jax.function.call_arguments import ReplicaArguments
from keras_strategies.engines.jax.function.composite_values import (
    put_together,
    taken_apart,
)
from keras_strategies.engines.jax.function.state_refs import (
    OnReadRef,
    StateRef,
    VariableRef,
)
from keras_strategies.engines.jax.function.trace_state import (
    ProgramState,
    TraceState,
    is_stacked,
)
from keras_strategies.engines.jax.run.replica_mesh import ReplicaMesh
from keras_strategies.engines.jax.run.row_numbers import draws_of
from keras_strategies.engines.jax.run.traced_reductions import (
    all_reduce_over,
    check_axis,
    sums_over,
)
from keras_strategies.engines.jax.run.traced_replica_state import (
    MergedState,
    TracedReplicas,
    TracedReplicaState,
    current_replica_state,
    merged_value,
)
from keras_strategies.runtime.data_parallel.draw_lengths import (
    DrawLengths,
    EarlierDraws,
)
from keras_strategies.runtime.data_parallel.row_draws import drawing
from keras_strategies.runtime.replicas.collectives import (
    MergeArguments,
)
from keras_strategies.runtime.state import run_state
from keras_strategies.types import ReduceOp
from keras_strategies.values import DistributedValues, PerReplica, map_structure


class _NotUniformError(Exception):
    """The replicas of this function cannot share one trace."""


class _ShardedContext(context.ReplicaContext):
    """The replica context of a trace for all replicas."""

    @property
    def devices(self) -> tuple[str, ...]:
        """Raises: the names differ between replicas, and one trace serves all."""
        raise _NotUniformError("`ReplicaContext.devices` differs between replicas")

    def __repr__(self) -> str:
        return f"<ReplicaContext of each replica of {self._strategy!r}>"


class ShardMapReplicas(TracedReplicas):
    """A function on replicas that share one trace.

    Args:
        mesh: the replicas.
        fn: the function.
        arguments: those of all replicas.
        refs: the state that the function reads, as far as known.
        earlier: its draws in earlier runs.
    """

    def __init__(
        self,
        mesh: ReplicaMesh,
        fn: Callable[..., Any],
        arguments: ReplicaArguments,
        refs: list[StateRef],
        earlier: EarlierDraws,
    ):
        self._mesh = mesh
        self._axis = mesh.axis
        self._fn = fn
        self._arguments = arguments
        self._refs = refs
        self._earlier = earlier
        self._blocks: dict[Any, Any] = {}
        # Traced values that are equal on all replicas, by identity.
        self._replicated: dict[int, Any] = {}
        self._shared_inputs: dict[int, int] = {}
        self.missing: dict[Any, StateRef] = {}
        #: The state that the trace has read.
        self.used: dict[Any, StateRef] = {}
        self._written: list[StateRef] = []
        self._written_stacks: list[StateRef] = []
        self._result: Any = None

    # Around the trace.

    def mapped(self) -> Callable[..., Any]:
        along, replicated = jax.P(self._axis), jax.P()
        return jax.shard_map(
            self._body,
            mesh=self._mesh.mesh,
            in_specs=(replicated, along, replicated, along),
            out_specs=(replicated, along, replicated, along),
            axis_names={self._axis},
            # So that the gradient of an all-reduce is the same all-reduce.
            check_vma=False,
        )

    def inputs(self, state: TraceState, program: ProgramState) -> tuple[Any, ...]:
        variables = [c for c in self._refs if isinstance(c, VariableRef)]
        stacks = [c for c in self._refs if not isinstance(c, VariableRef)]
        return (
            [state.read_ref(ref) for ref in variables],
            [state.read_ref(ref) for ref in stacks],
            [jnp.asarray(value) for value in self._arguments.shared],
            [program.joined(parts) for parts in self._arguments.parts],
        )

    def finish(
        self, state: TraceState, program: ProgramState, results: tuple[Any, ...]
    ) -> list[Any]:
        """Writes the new state; returns a result for each replica."""
        replicated, joined, values, stacks = results
        for ref, value in zip(self._written, values, strict=True):
            state.write_ref(ref, value)
        for ref, value in zip(self._written_stacks, stacks, strict=True):
            state.write_ref(ref, value)
        count = self._mesh.count
        parts = [
            program.split(array, count, stacked)
            for array, stacked in zip(joined, self._stacked, strict=True)
        ]

        def leaf(own: tuple[str, Any], replica_id: int) -> Any:
            kind, value = own
            if kind == "static":
                return value
            if kind == "input":
                return self._arguments.shared[value]
            return (
                replicated[value] if kind == "replicated" else parts[value][replica_id]
            )

        return [
            map_structure(lambda own, i=i: leaf(own.value, i), self._result)
            for i in range(count)
        ]

    # Inside the trace.

    def _body(
        self,
        state: list[Any],
        stacks: list[Any],
        replicated: list[Any],
        parts: list[Any],
    ) -> tuple[list[Any], ...]:
        for ref, value in zip(self._refs_in_order(), [*state, *stacks], strict=True):
            self._blocks[ref.key] = value
        self._shared_inputs = {id(value): i for i, value in enumerate(replicated)}
        self._replicated.update({id(value): value for value in replicated})
        self._replica_id = lax.axis_index(self._axis)
        replica = _ShardedContext(
            self._mesh.strategy,
            self._replica_id,  # type: ignore[arg-type]
            self,
        )
        self._state = TracedReplicaState(replica, self._copy, self._local, self)
        args, kwargs = self._arguments.build(replicated, parts)
        lengths = DrawLengths(self._earlier)
        draws = draws_of(self._arguments.parts, self._replica_id, True, lengths)
        with context.on_replica(replica), self._state.scope(), drawing(draws):
            result = self._fn(*args, **kwargs)
            outputs = self._sorted_outputs(result)
        return (*outputs, *self._new_state())

    def _refs_in_order(self) -> list[StateRef]:
        state = [c for c in self._refs if isinstance(c, VariableRef)]
        return state + [c for c in self._refs if not isinstance(c, VariableRef)]

    def _read(self, ref: StateRef) -> Any:
        value = self._blocks.get(ref.key)
        if value is not None:
            self.used[ref.key] = ref
        else:
            found = ref.spec()
            if found is None:
                return None
            self.used[ref.key] = ref
            self.missing[ref.key] = ref
            shape = found.shape
            if isinstance(ref, OnReadRef):
                shape = (1, *shape[1:])
            value = self._blocks[ref.key] = jnp.zeros(shape, found.dtype)
        return value

    def _copy(self, variable: Any) -> Any:
        return self._read(VariableRef(variable))

    def _local(self, variable: Any, replica_id: Any) -> Any:
        block = self._read(OnReadRef(variable, self._mesh.on_read_values))
        return None if block is None else block[0]

    def _sorted_outputs(self, result: Any) -> tuple[list[Any], list[Any]]:
        replicated: list[Any] = []
        joined: list[Any] = []
        self._stacked: list[bool] = []

        def place(leaf: Any) -> Any:
            if not isinstance(leaf, jax.Array):
                return _Leaf(("static", leaf))
            if id(leaf) in self._shared_inputs:
                return _Leaf(("input", self._shared_inputs[id(leaf)]))
            if id(leaf) in self._replicated or not isinstance(leaf, jax.core.Tracer):
                replicated.append(leaf)
                return _Leaf(("replicated", len(replicated) - 1))
            self._stacked.append(is_stacked(leaf))
            joined.append(leaf[None] if is_stacked(leaf) else leaf)
            return _Leaf(("part", len(joined) - 1))

        self._result = map_structure(place, result)
        return replicated, joined

    def _new_state(self) -> tuple[list[Any], list[Any]]:
        values, stacks = [], []
        self._written, self._written_stacks = [], []
        for variable, value in self._state.updates.values():
            if run_state.is_local(variable):
                self._written_stacks.append(
                    OnReadRef(variable, self._mesh.on_read_values)
                )
                stacks.append(value[None])
            self._written.append(VariableRef(variable))
            values.append(
                merged_value(variable, self._values_of(self._state, variable))
            )
        return values, stacks

    def _values_of(self, state: TracedReplicaState, variable: Any) -> list[Any]:
        """A variable's values on the replicas; a single one if they are equal."""
        value = state.read(variable)
        if value is None or state.is_replicated(variable):
            return [value]
        return self._gather(value)

    def _gather(self, value: Any) -> list[Any]:
        gathered = lax.all_gather(value, self._axis)
        return [gathered[i] for i in range(self._mesh.count)]

    # Collectives.

    def total(self, replica: int, number: int | float) -> int | float:
        # A constant of the trace: no collective.
        return number * self._mesh.count

    def all_reduce(
        self, replica: int, op: ReduceOp, tensors: Sequence[Any]
    ) -> Sequence[Any]:
        return [all_reduce_over(op, tensor, self._axis) for tensor in tensors]

    def all_gather(
        self, replica: int, tensors: Sequence[Any], axis: int
    ) -> Sequence[Any]:
        for tensor in tensors:
            check_axis([tensor.shape], axis)
        return [
            lax.all_gather(t, self._axis, axis=axis % t.ndim, tiled=True)
            for t in tensors
        ]

    def merge_call(
        self, replica: int, merge: Callable[..., Any], arguments: MergeArguments
    ) -> Any:
        def gathered(leaf: Any) -> Any:
            if not isinstance(leaf, jax.core.Tracer) or id(leaf) in self._replicated:
                return leaf
            return PerReplica(self._gather(leaf))

        own = map_structure(gathered, taken_apart(arguments))
        args, kwargs = put_together(own)
        with self._merged():
            result = merge(*args, **kwargs)
        return put_together(map_structure(self._own, taken_apart(result)))

    def _own(self, leaf: Any) -> Any:
        """This replica's component of the result of a merged function."""
        if isinstance(leaf, DistributedValues):
            parts = leaf.values
            if all(part is parts[0] for part in parts):  # As of `reduce_to`.
                return self._own(parts[0])
            if not all(isinstance(part, jax.Array) for part in parts) or (
                len({(part.shape, part.dtype) for part in parts}) > 1
            ):
                raise _NotUniformError
            return jnp.stack(parts)[self._replica_id]
        if isinstance(leaf, jax.core.Tracer):
            self._replicated[id(leaf)] = leaf
        return leaf

    @contextlib.contextmanager
    def _merged(self) -> Iterator[None]:
        state = current_replica_state()

        def assign(variable: Any, value: Any) -> None:
            if run_state.is_local(variable):
                parts = run_state.parts(variable, value, self._mesh.count)
                state.set(variable, jnp.stack(parts)[self._replica_id])
            else:
                state.set(variable, value, replicated=True)

        merged = MergedState(lambda v: self._values_of(state, v), assign)
        with merged.scope():
            yield

    def apply(
        self, gradients: list[Any], aggregate: bool, update: Callable[[list[Any]], None]
    ) -> None:
        if aggregate:
            present = [g for g in gradients if g is not None]
            summed = iter(sums_over(present, self._axis))
            gradients = [None if g is None else next(summed) for g in gradients]
        with context.merged_replicas(self._mesh.strategy), self._merged():
            update(gradients)

    def value_and_grad(
        self, loss_fn: Callable[[list[Any]], Any], values: list[Any]
    ) -> Any:
        return jax.value_and_grad(loss_fn, has_aux=True)(values)


class _Leaf:
    """A leaf of a structure; tuples would be containers."""

    def __init__(self, value: Any):
        self.value = value
