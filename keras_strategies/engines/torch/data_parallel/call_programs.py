"""The program of a layer call: traced once, compiled, and called by replicas."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import torch

from keras_strategies.engines.torch.compat import compile_call, computed_again
from keras_strategies.engines.torch.data_parallel.assigned_values import assigned_value
from keras_strategies.engines.torch.data_parallel.program_ops import (
    CollectivesInProgram,
    DrawsInProgram,
    NotCompiledError,
    Running,
    prepare,
)
from keras_strategies.engines.torch.devices import DeviceName
from keras_strategies.engines.torch.random_numbers.block_draws import traced_draws
from keras_strategies.engines.torch.random_numbers.row_numbers import seeing_draws
from keras_strategies.engines.torch.rematerialization import recomputing_in
from keras_strategies.engines.torch.replicas.thread_collectives import (
    ThreadCollectives,
)
from keras_strategies.keras_compat.models.layers import set_mask
from keras_strategies.keras_compat.structures import with_leaves
from keras_strategies.keras_compat.thread_state import thread_state, with_thread_state
from keras_strategies.keras_compat.variables.generator_seeds import is_seed_state
from keras_strategies.runtime import context
from keras_strategies.runtime.data_parallel.replica_executor import CallOnReplica
from keras_strategies.runtime.data_parallel.split_plan import SplitPlan
from keras_strategies.runtime.random_numbers.row_draws import OwnRows, drawing
from keras_strategies.runtime.state.replica_state import ReplicaResult, ReplicaState

# Compilers use state of the process.
_lock = threading.Lock()


@dataclass
class CompiledResult(ReplicaResult):
    """A result of a program.

    Args:
        running: the replica.
        reached: for each output and loss, by `id`, those of the arguments and variables
            that it has a gradient by; empty if all have the same.
    """

    running: Running = field(kw_only=True)
    reached: Mapping[int, Collection[int]] = field(default_factory=dict)

    def gradients(
        self,
        outputs: Sequence[torch.Tensor],
        sources: Sequence[torch.Tensor],
        differentiate: Callable[[], Sequence[torch.Tensor | None]],
    ) -> Sequence[torch.Tensor | None]:
        """Gradients of `sources`; a program has zeros where there is none.

        Args:
            outputs: the outputs and losses that are differentiated.
            sources: arguments and variables.
            differentiate: calls the backward program.
        """
        with self.running.entered():
            found = differentiate()
        if not self.reached:
            return found
        reached = set().union(*(self.reached[id(each)] for each in outputs))
        pairs = zip(sources, found, strict=True)
        return [own if id(source) in reached else None for source, own in pairs]


@dataclass
class _Form:
    """The form of a program's results: outputs, masks, updates and losses, flat.

    Args:
        result: that of the trace.
        outputs: the numbers of the leaves that are tensors.
        masks: of those that have masks.
        updated: the variables that are assigned.
        draws: the draws of random numbers.
        reached: for each output and loss with a gradient its number among the results,
            and those of the arguments that it depends on; empty for one of them.
    """

    result: ReplicaResult
    outputs: list[int]
    masks: list[int]
    updated: list[Any]
    draws: DrawsInProgram
    reached: dict[int, frozenset[int]] = field(default_factory=dict)


class CallProgram:
    """A layer call on a replica with a number of rows, and its gradient.

    Args:
        plan: the plan of a call.
        call: the call on a replica.
        variables: the variables that it reads.
        slices: the slices of one replica.
        state: the variables of this replica.
        rows: its rows if the call draws random numbers.

    Raises:
        NotCompiledError: if there is no program of the call.
    """

    _form: _Form

    def __init__(
        self,
        plan: SplitPlan,
        call: CallOnReplica,
        variables: Sequence[Any],
        slices: Sequence[torch.Tensor],
        state: ReplicaState,
        rows: OwnRows | None,
    ):
        self._variables = list(variables)
        count = len(slices)

        def traced(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            values = dict(zip(map(id, variables), tensors[count:], strict=True))
            result, own, draws = _traced(plan, call, tensors[:count], values, rows)
            flat, self._form = _results(plan, result, own, draws, tensors)
            return flat

        like = [*slices, *map(state.read, self._variables)]
        # Patterns that the compiler looks for are traced with dropout of their own.
        with _lock, drawing(None), seeing_draws():
            try:
                self._compiled = compile_call(traced, like, prepare)
            except Exception as error:
                raise _reason(error) from error

    def call(
        self,
        plan: SplitPlan,
        collectives: ThreadCollectives,
        replica_id: int,
        slices: Sequence[torch.Tensor],
        state: ReplicaState,
        rows: OwnRows | None,
    ) -> CompiledResult:
        """What the call on this replica returns.

        Args:
            plan: the plan of the call.
            collectives: those of the replicas.
            replica_id: int, the number of the replica on this worker.
            slices: its slices.
            state: its variables.
            rows: its rows if the call draws random numbers.
        """
        form = self._form
        tensors = [*slices, *map(state.read, self._variables)]
        with state.scope():
            draws = form.draws.seeded(plan.draws(rows or OwnRows(0, 0, 0)))
        with Running(collectives, replica_id, draws).entered():
            results = list(self._compiled(*tensors))
        found = iter(results)
        leaves = list(form.result.leaves)
        for i in form.outputs:
            leaves[i] = next(found)
        for i in form.masks:
            set_mask(leaves[i], next(found))
        for variable in form.updated:
            state.updates[id(variable)] = variable, next(found).detach()
        return CompiledResult(
            with_leaves(form.result.outputs, leaves),
            state,
            list(found),
            form.result.calls,
            form.result.lines,
            running=Running(collectives, replica_id),
            reached={
                id(results[i]): {id(tensors[j]) for j in sources}
                for i, sources in form.reached.items()
            },
        )


def _reason(error: BaseException) -> NotCompiledError:
    """Why there is no program, of an error of the trace or of the compiler."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, NotCompiledError):
            return cause
        cause = cause.__cause__ or cause.__context__
    text = str(error).strip().split("\n")[0]
    return NotCompiledError(f"{type(error).__name__}: {text}")


def _traced(
    plan: SplitPlan,
    call: CallOnReplica,
    slices: Sequence[torch.Tensor],
    values: dict[int, torch.Tensor],
    rows: OwnRows | None,
) -> tuple[ReplicaResult, ReplicaState, DrawsInProgram]:
    """The call on tensors without values; see `CallProgram`.

    Args:
        plan: the plan of a call.
        call: the call on a replica.
        slices: tensors in the place of slices.
        values: those in the place of variables, by the `id` of each.
        rows: the rows of the replica if the call draws random numbers.
    """
    state = ReplicaState(
        lambda variable: _value(values, variable), assigned=assigned_value
    )
    draws = DrawsInProgram()
    token = traced_draws.set(draws)
    device = DeviceName(slices[0].device)
    try:
        with (
            context.on_replica(_replica(plan)),
            with_thread_state({**thread_state(), "torch_device": device}),
            recomputing_in(computed_again, is_traced=True),
        ):
            return call(slices, state, rows), state, draws
    finally:
        traced_draws.reset(token)


def _replica(plan: SplitPlan) -> context.ReplicaContext:
    count = plan.row_split.replica_set.counts.total

    def on_read(name: str) -> None:
        raise NotCompiledError(f"it reads `{name}` of its replica")

    collectives = CollectivesInProgram(count)
    return context.ReplicaContext(plan.strategy, 0, collectives, count, on_read)


def _results(
    plan: SplitPlan,
    result: ReplicaResult,
    state: ReplicaState,
    draws: DrawsInProgram,
    tensors: Sequence[torch.Tensor],
) -> tuple[tuple[torch.Tensor, ...], _Form]:
    """The tensors that a program returns, and their form."""
    calls = result.calls
    if calls is not None:
        # Torch decomposes its operations, below those that the code calls.
        calls = [call for call in calls if "FakeTensor" not in call]
    proved = plan.proof.calls.get(len(tensors[0]), calls)
    if result.has_diverged or calls != proved:
        raise NotCompiledError("its code computes something else in a trace")
    leaves = result.leaves
    outputs = [i for i, leaf in enumerate(leaves) if keras.ops.is_tensor(leaf)]
    masks = [i for i in outputs if result.masks[i] is not None]
    updates = list(state.updates.values())
    if any(is_seed_state(variable) for variable, _ in updates):
        raise NotCompiledError("it reads the state of a `SeedGenerator`")
    flat = [
        *(leaves[i] for i in outputs),
        *(result.masks[i] for i in masks),
        *(value.detach() for _, value in updates),
        *result.losses,
    ]
    kept = ReplicaResult(
        keras.tree.map_structure(
            lambda leaf: None if keras.ops.is_tensor(leaf) else leaf, result.outputs
        ),
        ReplicaState(lambda variable: None),
        [],
        calls,
        result.lines,
    )
    form = _Form(kept, outputs, masks, [v for v, _ in updates], draws)
    differentiable = [i for i, x in enumerate(flat) if x.requires_grad]
    if len(differentiable) > 1:
        form.reached = {
            i: frozenset(_reached(flat[i], tensors)) for i in differentiable
        }
    return tuple(flat), form


def _value(values: dict[int, torch.Tensor], variable: Any) -> torch.Tensor:
    if id(variable) not in values:
        raise NotCompiledError(
            f"it reads variable {variable.path!r} in some calls only"
        )
    return values[id(variable)]


def _reached(output: torch.Tensor, inputs: Sequence[torch.Tensor]) -> Iterator[int]:
    """The numbers of the inputs that an output has a gradient by."""
    edge = torch.autograd.graph.get_gradient_edge
    waiting = [edge(output).node]
    seen = set(waiting)
    while waiting:
        for node, _ in waiting.pop().next_functions:
            if node is not None and node not in seen:
                seen.add(node)
                waiting.append(node)
    for i, tensor in enumerate(inputs):
        if tensor.requires_grad and edge(tensor).node in seen:
            yield i
