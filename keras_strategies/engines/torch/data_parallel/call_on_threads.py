"""One layer call on threads: forward and backward passes of the replicas."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from keras_strategies.engines.torch.compat import (
    is_graph_retained,
    version_of,
    without_donated_buffers,
)
from keras_strategies.engines.torch.cuda_batches import device_rows
from keras_strategies.engines.torch.data_parallel.assigned_values import assigned_value
from keras_strategies.engines.torch.data_parallel.compiled_calls import CompiledCalls
from keras_strategies.engines.torch.data_parallel.worker_sums import WorkerSums
from keras_strategies.engines.torch.devices import moved, torch_device
from keras_strategies.engines.torch.random_numbers.block_draws import ReplicaSeeds
from keras_strategies.engines.torch.random_numbers.replica_generators import (
    ReplicaGenerators,
    generator_of,
)
from keras_strategies.engines.torch.random_numbers.row_numbers import (
    partitioned_step,
    seeing_draws,
)
from keras_strategies.engines.torch.replicas.replica_threads import ReplicaThreads
from keras_strategies.engines.torch.replicas.replica_variables import ReplicaVariables
from keras_strategies.engines.torch.replicas.thread_collectives import (
    ThreadCollectives,
)
from keras_strategies.engines.torch.replicas.thread_state import Streams
from keras_strategies.errors import ContextError
from keras_strategies.keras_compat.models.layer_calls import layer_calls_through
from keras_strategies.keras_compat.models.layers import keeps_masks
from keras_strategies.keras_compat.thread_state import thread_state, with_thread_state
from keras_strategies.keras_compat.variables.values import raw_value
from keras_strategies.runtime import context
from keras_strategies.runtime.data_parallel.call_on_replicas import recomputed
from keras_strategies.runtime.data_parallel.gradient_boundary import (
    BackwardPass,
    GradientBoundary,
)
from keras_strategies.runtime.data_parallel.replica_executor import (
    CallOnReplica,
    ForwardPass,
    ReplicaExecutor,
)
from keras_strategies.runtime.data_parallel.row_parts import parts_of
from keras_strategies.runtime.data_parallel.split_plan import SplitPlan
from keras_strategies.runtime.replica_context import ReplicaContext
from keras_strategies.runtime.replicas.tensor_primitives import is_float
from keras_strategies.runtime.state.replica_state import (
    AddedState,
    CallState,
    ReplicaResult,
    ReplicaState,
)

if TYPE_CHECKING:
    from keras_strategies.engines.torch.data_parallel.call_programs import (
        CallProgram,
        CompiledResult,
    )


class CallOnThreads(ReplicaExecutor):
    """The replicas of one layer call, each on its thread.

    Args:
        plan: the plan of the call.
        threads: the threads of the replicas.
        variables: the replicas' copies of variables.
        compiled: the programs of the strategy's layer calls.
    """

    def __init__(
        self,
        plan: SplitPlan,
        threads: ReplicaThreads,
        variables: ReplicaVariables,
        compiled: CompiledCalls,
    ):
        self.plan = plan
        self._compiled = compiled
        self._programs: list[CallProgram] | None = None
        self._results: list[ReplicaResult] = []
        self._threads = threads
        self._variables = variables
        self._weights = variables.of_call(plan.layer_call.layer)
        self._row_split = plan.row_split
        self._draws = bool(plan.proof.draws)
        replicas = plan.strategy.placement.replicas[: len(plan.row_split.sizes)]
        self._devices = [torch_device(device) for device in replicas]
        # Keras's own layers change nothing that replicas share, but a generator that is
        # a sequence, and masks. The backward pass uses the same collectives.
        self._in_turn = not plan.proof.is_by_type or (
            self._draws
            and (
                not plan.strategy.partitions_draws or keeps_masks(plan.layer_call.layer)
            )
        )
        self._collectives = ThreadCollectives(
            replicas,
            is_sequential=self._in_turn,
            replica_set=plan.row_split.replica_set,
        )
        self._state = thread_state()
        # Autograd runs the backward pass of an operation on its stream, but makes only
        # the stream of one device current.
        self._streams = Streams(self._devices)
        self._is_recorded = torch.is_grad_enabled()
        # The states of the process's generators before the call, which a call that is
        # not split, or one for second-order gradients, draws from again.
        self._generators: list[tuple[torch.Generator, torch.Tensor]] = []
        if self._draws and (self._is_recorded or not plan.proof.is_by_type):
            lead = torch_device(plan.lead)
            generators = {generator_of(torch.device("cpu")), generator_of(lead)}
            self._generators = _with_states(generators)

    # Forward.

    def forward(
        self, tensors: Sequence[torch.Tensor], call: CallOnReplica
    ) -> ForwardPass:
        slices = [self._split(tensor) for tensor in tensors]
        kind = self._compiled.kind_of(self.plan, slices)
        if kind is not None:
            self._programs = self._compiled.programs(
                *(kind, self.plan, self._devices, self._weights is not None),
                functools.partial(self._compile, call, slices),
            )
        if self._programs is not None:
            # A program runs no code of Python's.
            self._in_turn = False
            self._collectives.restart(is_sequential=False)
        is_shared = self._draws and len(self._devices) > 1
        seeds = (
            ReplicaSeeds(len(self._devices))
            if is_shared and not self._in_turn
            else None
        )
        tasks = [
            self._task(i, [parts[i] for parts in slices], call, seeds)
            for i in range(len(self._devices))
        ]
        with (
            self._collectives.drawing_from(ReplicaGenerators(self._devices))
            if is_shared and self._in_turn
            else seeds or contextlib.nullcontext()
        ):
            self._results = results = self._run(tasks)
        if kind is not None and self._programs is None:
            kind.note(results[0])
        if not self._is_recorded:
            return ForwardPass(results, slices, [False] * len(slices), [])
        return ForwardPass(
            results,
            slices,
            [parts[0].requires_grad for parts in slices],
            [_with_gradient(result.state.reads) for result in results],
        )

    def _compile(
        self,
        call: CallOnReplica,
        slices: Sequence[Sequence[torch.Tensor]],
        replica_id: int,
        variables: Sequence[Any],
    ) -> CallProgram:
        """The program of a replica; see `CompiledCalls`."""
        from keras_strategies.engines.torch.data_parallel.call_programs import (
            CallProgram,
        )

        state = self._replica_state(replica_id)
        assert isinstance(state, ReplicaState)
        own = [parts[replica_id] for parts in slices]
        rows = self.plan.own_rows(replica_id) if self._draws else None
        return CallProgram(self.plan, call, variables, own, state, rows)

    def undo_draws(self) -> None:
        _restore(self._generators)

    def _split(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Slices of a tensor along axis 0, each on its replica's device."""
        local = parts_of(tensor, self._row_split)
        if local is None:
            own = self._row_split.own(tensor.detach())
            parts = torch.split(own, list(self._row_split.sizes))
            local = [
                device_rows(part, device)
                for part, device in zip(parts, self._devices, strict=True)
            ]
        if tensor.requires_grad and torch.is_grad_enabled():
            local = [part.detach().requires_grad_() for part in local]
        return local

    def _task(
        self,
        replica_id: int,
        slices: Sequence[torch.Tensor],
        call: CallOnReplica,
        seeds: ReplicaSeeds | None,
    ) -> Callable[[], ReplicaResult]:
        rows = self.plan.own_rows(replica_id) if self._draws else None

        def run() -> ReplicaResult:
            with contextlib.ExitStack() as stack:
                if self._draws:
                    stack.enter_context(seeing_draws())
                if seeds is not None:
                    stack.enter_context(seeds.of_replica(replica_id))
                if self._weights is not None:
                    keeps = self._is_recorded
                    stack.callback(self._weights.end_pass, keeps=keeps)
                    stack.enter_context(self._weights.saved())
                state = self._replica_state(replica_id)
                if self._programs is None:
                    return call(slices, state, rows)
                assert isinstance(state, ReplicaState)
                return self._programs[replica_id].call(
                    *(self.plan, self._collectives, replica_id, slices, state, rows)
                )

        return run

    def _run(self, tasks: Sequence[Callable[[], Any]]) -> list[Any]:
        """Runs one task on each replica, in its context; results in order."""
        counts = self._row_split.replica_set.counts

        def in_context(i: int, task: Callable[[], Any]) -> Callable[[], Any]:
            replica = ReplicaContext(
                self.plan.strategy, counts.first + i, self._collectives, counts.total
            )

            def run() -> Any:
                with context.on_replica(replica):
                    return task()

            return run

        contextual = [in_context(i, task) for i, task in enumerate(tasks)]
        with self._variables.ordinary():
            return self._threads.run(contextual, self._collectives)

    def _replica_state(self, replica_id: int) -> CallState:
        """The variables of a local replica."""
        if self.plan.layer_call.only_adds:
            return AddedState()
        if self.plan.layer_call.adds:
            device = self._devices[replica_id]
            return ReplicaState(lambda variable: _zeros(variable, device))
        variables, weights = self._variables, self._weights
        if weights is None:
            read = functools.partial(variables.copy, replica_id)
            return ReplicaState(read, _cast_copy, assigned_value)

        def copy(variable: Any) -> torch.Tensor | None:
            found = weights.copy(variable)
            return variables.copy(replica_id, variable) if found is None else found

        return ReplicaState(
            copy,
            lambda value, dtype: (
                weights.cast(value, getattr(torch, dtype)) or _cast_copy(value, dtype)
            ),
            assigned_value,
            weights.used,
        )

    def connect(self, boundary: GradientBoundary) -> list[torch.Tensor]:
        targets = [target.tensor for target in boundary.targets]
        return list(_Boundary.apply(self, boundary, *targets))

    # Backward.

    def gradients(
        self,
        boundary: GradientBoundary,
        versions: list[int],
        gradients: Sequence[torch.Tensor | None],
    ) -> list[Any]:
        """Gradients of the targets of a boundary, from those of its channels.

        Args:
            boundary: the boundary.
            versions: those of the targets in the forward pass.
            gradients: the gradient of each channel.
        """
        if torch.is_grad_enabled():
            return self._differentiable_gradients(boundary, versions, gradients)
        plan, retains_graph = self.plan, is_graph_retained()

        with self._streams.current():
            # It draws nothing, but a user's code may run in it.
            is_program = self._programs is not None
            self._collectives.restart(
                is_sequential=not plan.proof.is_by_type and not is_program
            )
            sums = None
            if plan.row_split.workers is not None:
                sums = WorkerSums(
                    plan.ops,
                    boundary.targets,
                    plan.row_split,
                    self._variables.shards,
                )
            with sums or contextlib.nullcontext():
                passes = boundary.backward(boundary.shares(gradients))
                tasks = [
                    functools.partial(self._backward, i, each, retains_graph)
                    for i, each in enumerate(passes)
                ]
                columns = boundary.columns(self._run(tasks))
            if sums is None:
                return boundary.sums(columns)
            if self._weights is not None:
                self._weights.end_pass()
            with self._variables.ordinary():
                return sums.gradients(columns)

    def _backward(
        self, replica_id: int, backward: BackwardPass, retains_graph: bool
    ) -> Sequence[torch.Tensor | None]:
        """The gradients of a replica's tensors, in its context."""
        sources = backward.sources
        pairs = [pair for pair in backward.outputs if pair[0].requires_grad]
        if not pairs or not sources:
            return [None] * len(sources)
        outputs = [part for part, _ in pairs]
        differentiate = functools.partial(
            torch.autograd.grad,
            outputs,
            sources,
            [moved(share, part.device) for part, share in pairs],
            allow_unused=True,
            retain_graph=retains_graph,
        )
        if self._programs is not None:
            result = cast("CompiledResult", self._results[replica_id])
            keeps = without_donated_buffers if retains_graph else contextlib.nullcontext
            with keeps():
                return result.gradients(outputs, sources, differentiate)
        # Rematerialized layers read the replica's copies of variables, and call the
        # layers in them on the replica's rows.
        with layer_calls_through(None), self._replica_state(replica_id).scope():
            return differentiate()

    def _differentiable_gradients(
        self,
        boundary: GradientBoundary,
        versions: list[int],
        gradients: Sequence[torch.Tensor | None],
    ) -> list[Any]:
        """The gradients with a graph, for `create_graph=True`."""
        targets = [target.tensor for target in boundary.targets]
        assigned = {id(variable) for variable, _ in boundary.before}
        if any(
            version_of(target.tensor) != version and id(target.variable) not in assigned
            for target, version in zip(boundary.targets, versions, strict=True)
        ):
            raise ContextError(
                "A backward pass with `create_graph=True` came after an update "
                "of a variable of the layer. Compute second-order gradients "
                "before the optimizer's step."
            )
        with with_thread_state(self._state), self._same_draws():
            outputs = recomputed(boundary, self._variables.value, assigned_value)
        found = [output for output in outputs if is_float(output)]
        pairs = [
            (output, gradient)
            for output, gradient in zip(found, gradients, strict=True)
            if gradient is not None and output.requires_grad
        ]
        # A variable is several sources where each of its reads has a gradient.
        wanted = {id(target): target for target in targets}
        results = torch.autograd.grad(
            [output for output, _ in pairs],
            list(wanted.values()),
            [gradient for _, gradient in pairs],
            create_graph=True,
            allow_unused=True,
        )
        remaining = dict(zip(wanted, results, strict=True))
        return [remaining.pop(id(target), None) for target in targets]

    @contextlib.contextmanager
    def _same_draws(self) -> Iterator[None]:
        """Context in which the unsplit call draws the numbers of the replicas."""
        by_rows: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self.plan.strategy.partitions_draws:
            by_rows = partitioned_step()
        later = _with_states(generator for generator, _ in self._generators)
        _restore(self._generators)
        try:
            with by_rows:
                yield
        finally:
            _restore(later)


def _with_states(
    generators: Iterable[torch.Generator],
) -> list[tuple[torch.Generator, torch.Tensor]]:
    return [(each, each.get_state()) for each in generators]


def _restore(states: Iterable[tuple[torch.Generator, torch.Tensor]]) -> None:
    for generator, state in states:
        generator.set_state(state)


def _zeros(variable: Any, device: torch.device) -> torch.Tensor:
    return torch.zeros_like(raw_value(variable), device=device, requires_grad=False)


def _with_gradient(
    reads: dict[Any, tuple[Any, torch.Tensor]],
) -> dict[Any, tuple[Any, torch.Tensor]]:
    return {key: pair for key, pair in reads.items() if pair[1].requires_grad}


def _cast_copy(value: torch.Tensor, dtype: str) -> torch.Tensor | None:
    """A copy of a variable in a dtype, with a separate gradient; None without one."""
    if not value.requires_grad:
        return None
    return value.detach().to(getattr(torch, dtype)).requires_grad_()


class _Boundary(torch.autograd.Function):
    """The edge between the global batch and the replicas in the autograd graph."""

    @staticmethod
    def forward(ctx, executor, boundary, *targets):  # type: ignore[no-untyped-def]
        ctx.executor, ctx.boundary = executor, boundary
        ctx.versions = list(map(version_of, targets))
        ctx.set_materialize_grads(False)
        # A sum over workers is a view of a message; a view that a function returns
        # must not be changed in place.
        return tuple(x.clone() if x.dim() == 0 else x for x in boundary.combined())

    @staticmethod
    def backward(ctx, *gradients):  # type: ignore[no-untyped-def]
        boundary, versions = ctx.boundary, ctx.versions
        found = ctx.executor.gradients(boundary, versions, gradients)
        return None, None, *found
