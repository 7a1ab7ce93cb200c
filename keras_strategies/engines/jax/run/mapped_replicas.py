"""Replicas under `jax.shard_map`: what their traces have in common."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

from keras_strategies.engines.jax.function.call_arguments import ReplicaArguments
from keras_strategies.engines.jax.function.refused_values import check_values
from keras_strategies.engines.jax.function.state_refs import (
    OnReadRef,
    StateRef,
    VariableRef,
)
from keras_strategies.engines.jax.function.trace_state import (
    ProgramState,
    TraceState,
)
from keras_strategies.engines.jax.run.refused_functions import (
    NotUniformError,
    NumberNeededError,
    needs_a_value,
)
from keras_strategies.engines.jax.run.replica_mesh import ReplicaMesh
from keras_strategies.engines.jax.run.row_numbers import rows_of_parts
from keras_strategies.engines.jax.run.traced_reductions import sums_over
from keras_strategies.engines.jax.run.traced_replica_state import (
    MergedState,
    TracedReplicas,
    TracedReplicaState,
    merged_value,
)
from keras_strategies.runtime.frames import merged_replicas
from keras_strategies.runtime.replica_context import ReplicaContext
from keras_strategies.runtime.state import run_state
from keras_strategies.values import map_structure

# A leaf of a replica's result, of the program's replicated results and of the replica's
# components of the others.
ResultLeaf = Callable[[Sequence[Any], Sequence[Any]], Any]


class MappedReplicas(TracedReplicas):
    """A function on replicas that are one program over their devices.

    Args:
        mesh: the replicas.
        fn: the function.
        arguments: those of all replicas.
        refs: the state that the function reads, as far as known.
    """

    #: Whether they may exchange sums over rows of layers.
    exchanges = True

    def __init__(
        self,
        mesh: ReplicaMesh,
        fn: Callable[..., Any],
        arguments: ReplicaArguments,
        refs: list[StateRef],
    ):
        self._mesh = mesh
        self._axis = mesh.axis
        self._fn = fn
        self._arguments = arguments
        self._refs = refs
        self._blocks: dict[Any, Any] = {}
        self.missing: dict[Any, StateRef] = {}
        # Whether the trace has read the number of the replica.
        self._has_read_number = False
        #: The state that the trace has read.
        self.used: dict[Any, StateRef] = {}
        self._written: list[StateRef] = []
        self._written_stacks: list[StateRef] = []

    # Around the trace.

    def mapped(self) -> Callable[..., Any]:
        """The program, a callable of `inputs`."""
        along, replicated = jax.P(self._axis), jax.P()
        state = [along if isinstance(c, OnReadRef) else replicated for c in self._refs]
        return jax.shard_map(
            self._body,
            mesh=self._mesh.mesh,
            in_specs=(state, replicated, along),
            out_specs=(replicated, along, replicated, along),
            axis_names={self._axis},
            # So that the gradient of an all-reduce is the same all-reduce.
            check_vma=False,
        )

    def inputs(self, state: TraceState, program: ProgramState) -> tuple[Any, ...]:
        """The state and arguments of the program."""
        return (
            [state.read_ref(ref) for ref in self._refs],
            [jnp.asarray(value) for value in self._arguments.shared],
            [program.joined(parts) for parts in self._arguments.parts],
        )

    @abc.abstractmethod
    def finish(
        self, state: TraceState, program: ProgramState, results: tuple[Any, ...]
    ) -> list[Any]:
        """Writes the new state; returns a result for each replica."""

    def _write(self, state: TraceState, values: list[Any], stacks: list[Any]) -> None:
        refs = (*self._written, *self._written_stacks)
        for ref, value in zip(refs, (*values, *stacks), strict=True):
            state.write_ref(ref, value)

    # Inside the trace.

    @abc.abstractmethod
    def _body(
        self, state: list[Any], replicated: list[Any], parts: list[Any]
    ) -> tuple[list[Any], ...]:
        """The program on a device."""

    def _replica(self, replica_id: Any) -> ReplicaContext:
        """The replica context of the trace.

        Args:
            replica_id: the number of the replica, a tensor.
        """
        return ReplicaContext(
            self._mesh.strategy, replica_id, self, on_read=self._note_read
        )

    def _call(self, args: Sequence[Any], kwargs: dict[str, Any], number: int) -> Any:
        """The result of the function, with the rows of one replica."""
        sizes = rows_of_parts(self._arguments.parts)
        own = sizes[number] if sizes else None
        try:
            run = self._mesh.mixed_rows.of_run(sizes, self.exchanges)
            with run.on_replica(own):
                result = self._fn(*args, **kwargs)
        except Exception as error:
            if self._has_read_number and needs_a_value(error):
                raise NumberNeededError(error) from error
            raise
        check_values(result)
        return result

    def _placed(
        self, result: Any, shared: list[Any], place: Callable[[Any], ResultLeaf]
    ) -> Any:
        """A result with a `ResultLeaf` in place of each leaf.

        Args:
            result: the result of the function.
            shared: the arguments that are one object on all replicas, in the trace.
            place: called with each array that is none of them.
        """
        numbers = {id(value): i for i, value in enumerate(shared)}

        def placed(leaf: Any) -> ResultLeaf:
            if not isinstance(leaf, jax.Array):
                return lambda *_: leaf
            number = numbers.get(id(leaf))
            if number is None:
                return place(leaf)
            return lambda *_: self._arguments.shared[number]

        return map_structure(placed, result)

    def _note_read(self, name: str) -> None:
        """Notes that a property is read that differs between the replicas."""
        if name == "devices":
            raise NotUniformError("`ReplicaContext.devices` differs between them")
        self._has_read_number = True

    def _take_state(self, state: list[Any]) -> None:
        keys = [ref.key for ref in self._refs]
        self._blocks.update(zip(keys, state, strict=True))

    def _read(self, ref: StateRef) -> Any:
        value = self._blocks.get(ref.key)
        if value is None:
            found = ref.spec()
            if found is None:
                return None
            self.missing[ref.key] = ref
            shape = found.shape
            if isinstance(ref, OnReadRef):
                shape = (1, *shape[1:])
            # A constant for each trace that reads it.
            value = self._blocks[ref.key] = np.zeros(shape, found.dtype)
        self.used[ref.key] = ref
        return jnp.asarray(value) if isinstance(value, np.ndarray) else value

    def _copy(self, variable: Any) -> Any:
        return self._read(VariableRef(variable))

    def _local(self, variable: Any, replica_id: Any) -> Any:
        block = self._read(OnReadRef(variable, self._mesh.on_read_values))
        return None if block is None else block[0]

    def _new_state(self, state: TracedReplicaState) -> tuple[list[Any], list[Any]]:
        values, stacks = [], []
        self._written, self._written_stacks = [], []
        for variable, value in state.updates.values():
            if run_state.is_local(variable):
                self._written_stacks.append(
                    OnReadRef(variable, self._mesh.on_read_values)
                )
                stacks.append(value[None])
            self._written.append(VariableRef(variable))
            values.append(merged_value(variable, self._values_of(state, variable)))
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

    @contextlib.contextmanager
    def _merged(self, state: TracedReplicaState) -> Iterator[None]:
        replica_id = state.replica.replica_id_in_sync_group

        def assign(variable: Any, value: Any) -> None:
            if run_state.is_local(variable):
                parts = run_state.parts(variable, value, self._mesh.count)
                state.set(variable, jnp.stack(parts)[replica_id])
            else:
                state.set(variable, value, replicated=True)

        merged = MergedState(lambda v: self._values_of(state, v), assign)
        with merged.scope():
            yield

    def _update(
        self,
        state: TracedReplicaState,
        gradients: list[Any],
        aggregate: bool,
        update: Callable[[list[Any]], None],
    ) -> None:
        if aggregate:
            present = [g for g in gradients if g is not None]
            summed = iter(sums_over(present, self._axis))
            gradients = [None if g is None else next(summed) for g in gradients]
        with merged_replicas(self._mesh.strategy), self._merged(state):
            update(gradients)
