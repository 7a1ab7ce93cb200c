"""`Strategy.run` in a trace: all replicas become one program over a mesh.

# Two ways to trace replicas

*`shard_map`*. The function is traced once over the replicas' devices, and each device
computes its shard. The replica's number is a traced scalar.

*`shard_map` with branches*. Where replicas have different numbers of rows, as in an
uneven last batch, the function is traced once for each number. Each device computes the
branch of its rows (`switched_replicas.py`).

What is neither is an error (`refused_functions.py`): replicas with different rows that
exchange something, and Python that branches on the replica's number.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax

from keras_strategies.engines.jax.devices import jax_device
from keras_strategies.engines.jax.function.call_arguments import ReplicaArguments
from keras_strategies.engines.jax.function.program_sharding import ProgramSharding
from keras_strategies.engines.jax.function.refused_values import check_values
from keras_strategies.engines.jax.function.state_refs import OnReadValues, StateRef
from keras_strategies.engines.jax.function.trace_state import (
    MAX_TRACES,
    ProgramState,
    TraceState,
    check_sees_all,
    current_program,
)
from keras_strategies.engines.jax.run.refused_functions import (
    NotUniformError,
    NumberNeededError,
    of_arguments,
    of_replica_number,
    of_replicas,
)
from keras_strategies.engines.jax.run.replica_mesh import ReplicaMesh
from keras_strategies.engines.jax.run.row_numbers import drawn
from keras_strategies.engines.jax.run.shard_map_replicas import ShardMapReplicas
from keras_strategies.engines.jax.run.switched_replicas import (
    Branches,
    SwitchedReplicas,
)
from keras_strategies.engines.jax.run.traced_replica_state import MergedState
from keras_strategies.errors import ContextError
from keras_strategies.keras_compat.state_scope import current_policy
from keras_strategies.runtime import context
from keras_strategies.runtime.random_numbers.keras_draws import seeing_draws
from keras_strategies.runtime.replica_context import ReplicaContext
from keras_strategies.runtime.replicas.collectives import SingleReplica
from keras_strategies.runtime.replicas.mixed_rows import MixedRows
from keras_strategies.runtime.state.run_state import CREATE_ONCE

if TYPE_CHECKING:
    from keras_strategies.runtime.engine import StrategyCore


class ReplicaProgram:
    """Traces functions on the replicas of one strategy.

    A program computes the replicas of all workers, over a mesh of all their devices.
    Its inputs and results are those of the local replicas.

    Args:
        strategy: the strategy.
        mesh: a mesh of the devices of all replicas, with the replicas as first axis.
            Along other axes XLA shards the computation of a replica, by the shardings
            of variables.
        sharding_of: returns the sharding of a variable; None where all variables are
            replicated.
    """

    def __init__(
        self,
        strategy: StrategyCore,
        mesh: jax.sharding.Mesh,
        sharding_of: Callable[[Any], jax.sharding.Sharding] | None = None,
    ):
        placement = strategy.placement
        split = jax.NamedSharding(mesh, jax.P(mesh.axis_names[0]))
        home = jax_device(placement.variables)
        at_home = placement.mirrored or placement.mesh is not None
        self.sharding = ProgramSharding(
            jax.NamedSharding(mesh, jax.P()),
            split,
            None if at_home else jax.sharding.SingleDeviceSharding(home),
            sharding_of,
        )
        self.on_read_values = OnReadValues(len(mesh.devices), split)
        # Constants of a program are tensors of its trace; those of a proof have values.
        mixed_rows = MixedRows(strategy, proving=jax.ensure_compile_time_eval)
        self._mesh = ReplicaMesh(strategy, mesh, self.on_read_values, mixed_rows)
        # By code and shapes, the state that functions under `shard_map` have read: what
        # a trace begins with. It is right for every function, also for one that closes
        # over other values.
        self._known: dict[Any, dict[Any, StateRef]] = {}
        self._branches: dict[Any, Branches] = {}

    def __call__(
        self,
        fn: Callable[..., Any],
        args: Sequence[tuple[Any, ...]],
        kwargs: Sequence[dict[str, Any]],
    ) -> list[Any]:
        """The replicas' results, in a trace."""
        with seeing_draws(drawn):
            return self._results(fn, args, kwargs)

    def _results(
        self,
        fn: Callable[..., Any],
        args: Sequence[tuple[Any, ...]],
        kwargs: Sequence[dict[str, Any]],
    ) -> list[Any]:
        state = current_policy()
        program = current_program()
        if isinstance(state, MergedState):
            raise ContextError(
                "`run` was called in the function of a `merge_call`, inside another "
                "`run`. On JAX runs do not nest: call it after the outer `run` has "
                "returned."
            )
        if program is None:
            raise ContextError(
                "`run` was called in a function that JAX traces or differentiates and "
                "that is not a `ks.function`. Call `run` outside of it, and "
                "differentiate in the replica function, with `ks.value_and_grad`."
            )
        assert isinstance(state, TraceState)
        strategy = self._mesh.strategy
        check_sees_all(program, strategy)
        program.strategies[id(strategy)] = strategy
        if self._mesh.count == 1:
            return [run_single_replica(strategy, fn, args[0], kwargs[0])]
        calls = [(list(own), of) for own, of in zip(args, kwargs, strict=True)]
        check_values(calls)
        arguments = ReplicaArguments(calls)
        key = (code_of(fn), arguments.signature)
        if arguments.difference:
            raise of_arguments(fn, arguments)
        trace = self._sharded if arguments.is_uniform else self._switched
        try:
            return trace(key, state, program, fn, arguments)
        except NumberNeededError as error:
            raise of_replica_number(fn, error.error) from error.error
        except NotUniformError as error:
            raise of_replicas(fn, arguments, error) from error

    def _sharded(
        self,
        key: Any,
        state: TraceState,
        program: ProgramState,
        fn: Callable[..., Any],
        arguments: ReplicaArguments,
    ) -> list[Any]:
        known = self._known.get(key)
        refs = known or {}
        for _ in range(MAX_TRACES):
            replicas = ShardMapReplicas(self._mesh, fn, arguments, list(refs.values()))
            mapped = replicas.mapped()
            inputs = replicas.inputs(state, program)
            is_first = known is None and not refs
            results = (_shape_inference(mapped) if is_first else mapped)(*inputs)
            if not replicas.missing:
                break
            refs = {**refs, **replicas.missing}
        else:
            raise ContextError(
                f"{fn!r} was traced {MAX_TRACES} times, and each trace read variables "
                f"that no earlier trace had read. {CREATE_ONCE}"
            )
        if is_first:
            results = mapped(*inputs)
        if len(self._known) < 1000:
            self._known[key] = replicas.used
        return replicas.finish(state, program, results)

    def _switched(
        self,
        key: Any,
        state: TraceState,
        program: ProgramState,
        fn: Callable[..., Any],
        arguments: ReplicaArguments,
    ) -> list[Any]:
        if len(self._mesh.mesh.axis_names) > 1:
            raise NotUniformError("each replica has several devices, along a mesh axis")
        known = self._branches.get(key, Branches())
        for _ in range(MAX_TRACES):
            replicas = SwitchedReplicas(self._mesh, fn, arguments, known)
            mapped, inputs = replicas.mapped(), replicas.inputs(state, program)
            if replicas.is_first:
                _shape_inference(mapped)(*inputs)
            else:
                results = mapped(*inputs)
            learned = replicas.learned()
            if learned is None:
                break
            known = learned
        else:
            raise NotUniformError(f"{MAX_TRACES} traces of them were different")
        if len(self._branches) < 1000:
            self._branches[key] = known
        return replicas.finish(state, program, results)


def code_of(fn: Callable[..., Any]) -> Any:
    """What equal lambdas share: code, or the class of a callable without code."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    function = getattr(fn, "__func__", fn)
    return getattr(function, "__code__", type(fn))


def run_single_replica(
    strategy: StrategyCore,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Calls a function on a strategy's only replica."""
    program = current_program()
    if program is not None:
        program.strategies[id(strategy)] = strategy
    with context.on_replica(ReplicaContext(strategy, 0, SingleReplica())):
        return fn(*args, **kwargs)


def _shape_inference(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *inputs: jax.eval_shape(function, *inputs)
