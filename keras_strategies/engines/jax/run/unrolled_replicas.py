"""Replicas traced one by one, unrolled into one program."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax import numpy as jnp

from keras_strategies.engines.jax.function.call_arguments import ReplicaArguments
from keras_strategies.engines.jax.function.state_refs import OnReadRef, VariableRef
from keras_strategies.engines.jax.function.trace_state import TraceState
from keras_strategies.engines.jax.run.replica_mesh import ReplicaMesh
from keras_strategies.engines.jax.run.replica_threads import (
    collective_call,
    run_in_lockstep,
)
from keras_strategies.engines.jax.run.row_numbers import draws_of
from keras_strategies.engines.jax.run.traced_reductions import check_axis, reduce_parts
from keras_strategies.engines.jax.run.traced_replica_state import (
    MergedState,
    TracedReplicas,
    TracedReplicaState,
    current_replica_state,
    merged_value,
)
from keras_strategies.keras_compat.thread_state import thread_state, with_thread_state
from keras_strategies.keras_compat.variables.deferred import has_deferred_variables
from keras_strategies.runtime import context
from keras_strategies.runtime.data_parallel.draw_lengths import (
    DrawLengths,
    EarlierDraws,
)
from keras_strategies.runtime.data_parallel.row_draws import (
    RowDraws,
    drawing,
    row_draws,
)
from keras_strategies.runtime.replicas.collectives import (
    MergeArguments,
    call_merged,
)
from keras_strategies.runtime.state import run_state
from keras_strategies.types import ReduceOp


class UnrolledReplicas(TracedReplicas):
    """A function on replicas that are traced one by one into one program.

    Args:
        mesh: the replicas.
        state: the state of the program.
        fn: the function.
        earlier: its draws in earlier runs.
    """

    def __init__(
        self,
        mesh: ReplicaMesh,
        state: TraceState,
        fn: Callable[..., Any],
        earlier: EarlierDraws,
    ):
        self._mesh = mesh
        self._state = state
        self._fn = fn
        self._earlier = earlier

    def __call__(self, arguments: ReplicaArguments) -> list[Any]:
        has_deferred_variables()  # One list for all threads.
        states, tasks, lengths = [], [], DrawLengths(self._earlier)
        for i in range(self._mesh.count):
            replica = context.ReplicaContext(self._mesh.strategy, i, self)
            state = TracedReplicaState(replica, self._copier(i), self._local, self)
            states.append(state)
            draws = draws_of(arguments.parts, i, False, lengths)
            tasks.append(self._task(arguments.calls[i], replica, state, draws))
        results = run_in_lockstep(tasks)
        self._commit(states)
        return results

    def _task(
        self,
        call: tuple[Any, Any],
        replica: context.ReplicaContext,
        state: TracedReplicaState,
        draws: RowDraws,
    ) -> Callable[[], Any]:
        def run() -> Any:
            with context.on_replica(replica), state.scope(), drawing(draws):
                return self._fn(*call[0], **call[1])

        return run

    def _copier(self, replica_id: int) -> Callable[[Any], Any]:
        def copy(variable: Any) -> Any:
            return self._state.read_ref(VariableRef(variable))

        return copy

    def _local(self, variable: Any, replica_id: int) -> Any:
        stack = self._state.read_ref(OnReadRef(variable, self._mesh.on_read_values))
        return None if stack is None else stack[replica_id]

    def _commit(self, states: Sequence[TracedReplicaState]) -> None:
        for key in dict.fromkeys(key for state in states for key in state.updates):
            having = [state for state in states if key in state.updates]
            variable = having[0].updates[key][0]
            if run_state.is_local(variable):
                values = [state.read(variable) for state in states]
                ref = OnReadRef(variable, self._mesh.on_read_values)
                self._state.write_ref(ref, jnp.stack(values))
            else:
                values = [state.updates[key][1] for state in having]
                if all(state.is_replicated(variable) for state in having):
                    values = values[:1]
            self._state.write_ref(VariableRef(variable), merged_value(variable, values))

    # Collectives.

    def all_reduce(
        self, replica: int, op: ReduceOp, tensors: Sequence[Any]
    ) -> Sequence[Any]:
        def merge(every: list[list[Any]]) -> list[Any]:
            reduced = [reduce_parts(op, list(c)) for c in zip(*every, strict=True)]
            # Results of `run` that are one object are the same on all replicas.
            return [[jnp.copy(tensor) for tensor in reduced] for _ in every]

        found: list[Any] = collective_call("all_reduce", tensors, merge)
        return found

    def all_gather(
        self, replica: int, tensors: Sequence[Any], axis: int, are_equal: bool = False
    ) -> Sequence[Any]:
        def merge(every: list[list[Any]]) -> list[Any]:
            columns = [list(column) for column in zip(*every, strict=True)]
            for column in columns:
                check_axis([part.shape for part in column], axis)
            gathered = [jnp.concatenate(column, axis) for column in columns]
            return [[jnp.copy(tensor) for tensor in gathered] for _ in every]

        found: list[Any] = collective_call("all_gather", tensors, merge)
        return found

    def merge_call(
        self, replica: int, merge: Callable[..., Any], arguments: MergeArguments
    ) -> Any:
        def merged(every: list[Any]) -> list[Any]:
            with self._merged([state for _, state in every]):
                return call_merged(merge, [call for call, _ in every])

        call = (arguments, current_replica_state())
        return collective_call("merge_call", call, merged)

    @contextlib.contextmanager
    def _merged(self, states: Sequence[TracedReplicaState]) -> Iterator[None]:
        def values(variable: Any) -> list[Any]:
            found = [state.read(variable) for state in states]
            agree = all(state.is_replicated(variable) for state in states)
            return found[:1] if agree else found

        def assign(variable: Any, value: Any) -> None:
            if run_state.is_local(variable):
                parts = run_state.parts(variable, value, len(states))
            else:
                parts = [value] * len(states)
            for state, part in zip(states, parts, strict=True):
                state.set(variable, part, replicated=not run_state.is_local(variable))

        merged = MergedState(values, assign)
        with merged.scope():
            yield

    def apply(
        self, gradients: list[Any], aggregate: bool, update: Callable[[list[Any]], None]
    ) -> None:
        def merge(every: list[Any]) -> list[Any]:
            columns = zip(*(own for own, _ in every), strict=True)
            total = [_sum(list(c)) if aggregate else c[0] for c in columns]
            states = [state for _, state in every]
            with context.merged_replicas(self._mesh.strategy), self._merged(states):
                update(total)
            return [None] * len(every)

        collective_call("optimizer.apply", (gradients, current_replica_state()), merge)

    def value_and_grad(
        self, loss_fn: Callable[[list[Any]], Any], values: list[Any]
    ) -> Any:
        """The gradient of the sum of the replicas' losses, in one collective call.

        Collectives between replicas are thereby inside one differentiated function.
        """
        replica = context.current_replica()
        assert replica is not None
        draws = row_draws()

        def task(values: list[Any]) -> Any:
            with context.on_replica(replica), drawing(draws):
                return loss_fn(values)

        state = thread_state()

        def merge(every: list[Any]) -> list[Any]:
            def total(all_values: list[list[Any]]) -> tuple[Any, Any]:
                tasks = [
                    _with_state(state, task, values)
                    for (task, _, state), values in zip(every, all_values, strict=True)
                ]
                results = run_in_lockstep(tasks)
                losses = [loss for loss, _ in results]
                return sum(losses[1:], start=losses[0]), results

            differentiated = jax.value_and_grad(total, has_aux=True)
            (_, results), gradients = differentiated([values for _, values, _ in every])
            return list(zip(results, gradients, strict=True))

        return collective_call("value_and_grad", (task, values, state), merge)


def _with_state(
    state: dict[str, Any], task: Callable[[list[Any]], Any], values: list[Any]
) -> Callable[[], Any]:
    def run() -> Any:
        with with_thread_state(state):
            return task(values)

    return run


def _sum(parts: list[Any]) -> Any:
    present = [part for part in parts if part is not None]
    return reduce_parts(ReduceOp.SUM, present) if present else None
