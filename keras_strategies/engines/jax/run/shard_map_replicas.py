"""Replicas of equal shapes: one trace, which each device runs on its shard."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp

from keras_strategies.engines.jax.function.refused_values import check_values
from keras_strategies.engines.jax.function.trace_state import (
    ProgramState,
    TraceState,
    is_stacked,
)
from keras_strategies.engines.jax.run.mapped_replicas import MappedReplicas, ResultLeaf
from keras_strategies.engines.jax.run.refused_functions import NotUniformError
from keras_strategies.engines.jax.run.row_numbers import draws_of
from keras_strategies.engines.jax.run.traced_reductions import (
    all_reduce_over,
    check_axis,
)
from keras_strategies.engines.jax.run.traced_replica_state import (
    TracedReplicaState,
    current_replica_state,
)
from keras_strategies.runtime import context
from keras_strategies.runtime.random_numbers.row_draws import drawing
from keras_strategies.runtime.replicas.collectives import MergeArguments
from keras_strategies.types import ReduceOp
from keras_strategies.values import DistributedValues, PerReplica, map_structure


class ShardMapReplicas(MappedReplicas):
    """A function on replicas that share one trace; see `MappedReplicas`."""

    # Traced values that are equal on all replicas, by identity.
    _replicated: dict[int, Any]
    _stacked: list[bool]
    _result: Any

    # Around the trace.

    def finish(
        self, state: TraceState, program: ProgramState, results: tuple[Any, ...]
    ) -> list[Any]:
        replicated, joined, values, stacks = results
        self._write(state, values, stacks)
        count = self._mesh.count
        parts = [
            program.split(array, count, stacked)
            for array, stacked in zip(joined, self._stacked, strict=True)
        ]
        columns = zip(*parts, strict=True) if parts else [()] * count
        return [
            map_structure(lambda leaf, own=own: leaf(replicated, own), self._result)
            for own in columns
        ]

    # Inside the trace.

    def _body(
        self, state: list[Any], replicated: list[Any], parts: list[Any]
    ) -> tuple[list[Any], ...]:
        self._take_state(state)
        self._replicated = {id(value): value for value in replicated}
        self._replica_id = lax.axis_index(self._axis)
        replica = self._replica(self._replica_id)
        own = TracedReplicaState(replica, self._copy, self._local, self)
        components = [
            part[0] if is_stacked(every[0]) else part
            for part, every in zip(parts, self._arguments.parts, strict=True)
        ]
        args, kwargs = self._arguments.build(replicated, components)
        draws = draws_of(self._arguments.parts, self._replica_id)
        with context.on_replica(replica), own.scope(), drawing(draws):
            result = self._call(args, kwargs, 0)
            outputs = self._sorted_outputs(result, replicated)
        return (*outputs, *self._new_state(own))

    def _sorted_outputs(
        self, result: Any, shared: list[Any]
    ) -> tuple[list[Any], list[Any]]:
        replicated: list[Any] = []
        joined: list[Any] = []
        self._stacked = []

        def place(leaf: Any) -> ResultLeaf:
            if id(leaf) in self._replicated or not isinstance(leaf, jax.core.Tracer):
                replicated.append(leaf)
                number = len(replicated) - 1
                return lambda replicated, _: replicated[number]
            self._stacked.append(is_stacked(leaf))
            joined.append(leaf[None] if is_stacked(leaf) else leaf)
            number = len(joined) - 1
            return lambda _, own: own[number]

        self._result = self._placed(result, shared, place)
        return replicated, joined

    # Collectives.

    def total(self, replica: int, number: int | float) -> int | float:
        # A constant of the trace: no collective.
        return number * self._mesh.count

    def all_reduce(
        self, replica: int, op: ReduceOp, tensors: Sequence[Any]
    ) -> Sequence[Any]:
        return [all_reduce_over(op, tensor, self._axis) for tensor in tensors]

    def all_gather(
        self, replica: int, tensors: Sequence[Any], axis: int, are_equal: bool = False
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

        check_values(arguments)
        args, kwargs = map_structure(gathered, arguments)
        with self._merged(current_replica_state()):
            result = merge(*args, **kwargs)
        check_values(result)
        return map_structure(self._own, result)

    def _own(self, leaf: Any) -> Any:
        """This replica's component of the result of a merged function."""
        if isinstance(leaf, DistributedValues):
            parts = leaf.values
            if all(part is parts[0] for part in parts):  # As of `reduce_to`.
                return self._own(parts[0])
            if not all(isinstance(part, jax.Array) for part in parts) or (
                len({(part.shape, part.dtype) for part in parts}) > 1
            ):
                raise NotUniformError(
                    "a `merge_call` returns values for them that are no tensors of one "
                    "shape and dtype"
                )
            return jnp.stack(parts)[self._replica_id]
        if isinstance(leaf, jax.core.Tracer):
            self._replicated[id(leaf)] = leaf
        return leaf

    def apply(
        self, gradients: list[Any], aggregate: bool, update: Callable[[list[Any]], None]
    ) -> None:
        self._update(current_replica_state(), gradients, aggregate, update)
