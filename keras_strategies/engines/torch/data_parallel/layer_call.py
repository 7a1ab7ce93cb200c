"""Data-parallel layer call on Torch: forward and backward passes on threads."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from keras_strategies import context
from keras_strategies.collectives.replica_ops import LocalReduction
from keras_strategies.engines.torch.compat import is_graph_retained
from keras_strategies.engines.torch.data_parallel.call_cost import CallCost, measure
from keras_strategies.engines.torch.data_parallel.gradient_sums import (
    GradientTarget,
    WorkerSums,
    local_gradients,
    widened,
)
from keras_strategies.engines.torch.data_parallel.row_probing import probing
from keras_strategies.engines.torch.devices import torch_device
from keras_strategies.engines.torch.replicas.replica_random import (
    NoRandom,
    RandomCalls,
    ReplicaRandom,
)
from keras_strategies.engines.torch.replicas.replica_threads import ReplicaThreads
from keras_strategies.engines.torch.replicas.replica_variables import ReplicaVariables
from keras_strategies.engines.torch.replicas.thread_collectives import (
    ThreadCollectives,
)
from keras_strategies.engines.torch.tensor_primitives import PRIMITIVES
from keras_strategies.errors import ContextError
from keras_strategies.input.row_splits import split_sizes
from keras_strategies.keras_compat.models.layer_calls import layer_calls_through
from keras_strategies.keras_compat.models.layers import wraps_torch_modules
from keras_strategies.keras_compat.thread_state import thread_state, with_thread_state
from keras_strategies.keras_compat.variables.values import raw_value
from keras_strategies.runtime.data_parallel.layer_call import (
    Channel,
    DataParallelCall,
    ReplicaResult,
)
from keras_strategies.runtime.replicas.replica_set import RowSplit
from keras_strategies.runtime.row_checks.layer_probes import Randomness, flags
from keras_strategies.user_warnings import warn_user

if TYPE_CHECKING:
    from keras_strategies.runtime.engine import StrategyCore


class TorchDataParallelCall(DataParallelCall):
    """Runs a layer on the threads of a strategy."""

    def __init__(
        self,
        strategy: StrategyCore,
        threads: ReplicaThreads,
        variables: ReplicaVariables,
    ):
        super().__init__(strategy)
        self._devices = [torch_device(d) for d in self.placement.replicas]
        self._lead = torch_device(self.placement.variables)
        self._threads = threads
        self._variables = variables
        self._workers = self.placement.workers
        #: The strategy's `CrossDeviceOps`, None for torch's own sums.
        self.reduction = LocalReduction.of(strategy)
        self._collectives: ThreadCollectives | None = None
        # How the rows of the call under way are spread.
        self._row_split = RowSplit.local(PRIMITIVES, [1])
        self._random_calls = RandomCalls()
        self._random: ReplicaRandom = NoRandom()
        # On one physical device a small call is faster unsplit and computes the same,
        # unless replicas are to have batch statistics of their own.
        self._may_call_unsplit = (
            set(self._devices) == {self._lead}
            and strategy.sync_batch_norm
            and not strategy.always_split
            and self._workers is None
            and self.reduction is None
        )
        self._costs: weakref.WeakKeyDictionary[Any, CallCost] = (
            weakref.WeakKeyDictionary()
        )
        # How the calls of the current step were made.
        self._were_small: list[bool] = []
        self._foreign: weakref.WeakKeyDictionary[Any, bool] = (
            weakref.WeakKeyDictionary()
        )

    @contextlib.contextmanager
    def step(self, is_small: bool) -> Iterator[Callable[[], bool]]:
        """Context manager around a step.

        If all calls are so small that they run unsplit, two kernel threads take longer
        than one, because of synchronization.

        Args:
            is_small: bool, whether the step before this one was.

        Returns:
            A callable that says whether this one is.
        """
        self._were_small = []
        threads = torch.get_num_threads()
        if is_small:
            torch.set_num_threads(1)
        try:
            with layer_calls_through(self):
                yield lambda: bool(self._were_small) and all(self._were_small)
        finally:
            if is_small:
                torch.set_num_threads(threads)

    # Dynamo cannot follow threads; a compiled step runs around this call.
    @torch.compiler.disable
    def __call__(
        self,
        layer: Any,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        with self._random_calls.call(layer, flags(args, kwargs)) as self._random:
            return super().__call__(layer, call, args, kwargs)

    def sizes(
        self,
        layer: Any,
        rows: int,
        call_few: Callable[[], int],
        tensors: Sequence[Any],
    ) -> list[int] | None:
        if self._has_torch_modules(layer):
            return None
        every = split_sizes(rows, self.placement.share.total)
        if self._workers is None:
            row_split = RowSplit.local(PRIMITIVES, every)
        else:
            found = RowSplit.over(PRIMITIVES, every, self._workers)
            if found is None:
                # Too few for all workers: each computes all of them.
                return None
            row_split = found
        # Replicas without rows do not take part: they would add nothing.
        sizes = row_split.sizes
        is_alone = len(row_split.every) == 1 and self._devices[0] == self._lead
        if not sizes or (is_alone and self.reduction is None):
            return None
        self._row_split = row_split
        if self._may_call_unsplit:
            try:
                work = self._cost_of(layer, call_few)
            except Exception:
                # Whatever a layer raises on some of its rows: the check of rows, which
                # follows, calls it so too, reports the error and leaves it unsplit.
                return sizes
            self._were_small.append(not work.worth_splitting(rows, len(sizes)))
            if self._were_small[-1]:
                return None
        return sizes

    def _cost_of(self, layer: Any, call_few: Callable[[], int]) -> CallCost:
        work = self._costs.get(layer)
        if work is None:
            work = self._costs[layer] = measure(call_few)
        return work

    def _has_torch_modules(self, layer: Any) -> bool:
        """Whether a layer contains torch modules."""
        known = self._foreign.get(layer)
        if known is None:
            known = self._foreign[layer] = wraps_torch_modules(layer)
            if known:
                warn_user(
                    f"Layer {layer.name!r} contains torch modules. Their parameters "
                    "cannot be replaced by a replica's copies, so the layer runs on "
                    "one device with the full batch: exact, but not parallel. Write "
                    "it with Keras layers to run it on all replicas."
                )
        return known

    def split(self, tensor: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
        parts = torch.split(self._row_split.own(tensor.detach()), list(sizes))
        local = [
            part.to(device, non_blocking=True)
            for part, device in zip(parts, self._devices, strict=False)
        ]
        if tensor.requires_grad and torch.is_grad_enabled():
            local = [part.detach().requires_grad_() for part in local]
        return local

    def run(self, tasks: Sequence[Callable[[], Any]]) -> list[Any]:
        # The backward pass of these tasks uses the same collectives. Calls do not
        # nest: none is routed while one is under way.
        self._collectives = ThreadCollectives(
            self.placement.replicas[: len(tasks)],
            replica_set=self._row_split.replica_set,
            reduction=self.reduction,
        )
        return self._run(tasks, self._collectives, self._random)

    def _run(
        self,
        tasks: Sequence[Callable[[], Any]],
        collectives: ThreadCollectives,
        random: ReplicaRandom,
    ) -> list[Any]:
        replicas = collectives.replica_set

        def in_context(replica_id: int, task: Callable[[], Any]) -> Callable[[], Any]:
            replica = context.ReplicaContext(
                self.strategy, replicas.first + replica_id, collectives, replicas.total
            )

            def run() -> Any:
                with context.on_replica(replica):
                    return task()

            return run

        return self._threads.run(
            [in_context(i, task) for i, task in enumerate(tasks)], collectives, random
        )

    def copy_variable(self, replica_id: int, variable: Any) -> torch.Tensor | None:
        return self._variables.copy(replica_id, variable)

    def assigned_value(
        self, variable: Any, read: Callable[[], torch.Tensor], value: torch.Tensor
    ) -> torch.Tensor:
        current = read()
        if torch.is_grad_enabled() and current.requires_grad:
            assigned: torch.Tensor = _Assigned.apply(current, value.detach())
            return assigned
        value = value.detach()
        # The variable's own memory changes when the assignments are merged, before
        # the backward pass.
        return value.clone() if value.data_ptr() == current.data_ptr() else value

    def cast_copy(
        self, replica_id: int, value: torch.Tensor, dtype: str
    ) -> torch.Tensor | None:
        if not value.requires_grad:
            return None
        return value.detach().to(getattr(torch, dtype)).requires_grad_()

    def connect(
        self,
        inputs: Sequence[tuple[Any, list[Any]]],
        results: Sequence[ReplicaResult],
        channels: Sequence[Channel],
    ) -> list[torch.Tensor]:
        assert self._collectives is not None
        sources = _sources(inputs, results) if torch.is_grad_enabled() else []
        job = _Job(
            self, channels, sources, len(results), self._collectives, self._row_split
        )
        if not sources:
            return job.combine()
        return list(_Boundary.apply(job, *(source.tensor for source in sources)))

    def to_lead(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to(self._lead)

    def joined(self, parts: list[torch.Tensor]) -> torch.Tensor:
        return self._row_split.joined(torch.cat([self.to_lead(part) for part in parts]))

    def all_fractions(self, sizes: list[int], rows: int) -> list[float]:
        return self.fractions(self._row_split.every, rows)

    def on_all_workers(
        self, columns: list[list[torch.Tensor]]
    ) -> list[list[torch.Tensor]]:
        return self._row_split.replica_set.all_values(columns)

    def values_of(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def probe_input(self, tensor: torch.Tensor, rows: int | None) -> torch.Tensor:
        return tensor[:rows].detach().to(self._lead)

    def probing(self, quantile: float) -> contextlib.AbstractContextManager[Randomness]:
        return probing(self._lead, quantile)


def _sources(
    inputs: Sequence[tuple[Any, list[Any]]], results: Sequence[ReplicaResult]
) -> list[GradientTarget]:
    found: dict[Any, GradientTarget] = {}
    for replica_id, result in enumerate(results):
        for key, (variable, local) in result.state.reads.items():
            if local.requires_grad:
                if key not in found:
                    raw = raw_value(variable)
                    found[key] = GradientTarget(
                        raw, [None] * len(results), by_rows=False
                    )
                found[key].locals[replica_id] = local
    sources = list(found.values())
    for tensor, slices in inputs:
        if slices[0].requires_grad:
            sources.append(GradientTarget(tensor, list(slices), by_rows=True))
    return sources


class _Job:
    """One data-parallel call, between its forward and its backward pass."""

    def __init__(
        self,
        call: TorchDataParallelCall,
        channels: Sequence[Channel],
        sources: Sequence[GradientTarget],
        count: int,
        collectives: ThreadCollectives,
        row_split: RowSplit,
    ):
        self.call = call
        self.row_split = row_split
        self.channels = channels
        self.sources = sources
        self.count = count
        self.collectives = collectives
        self.lead = call._lead
        assert call._layer_call is not None
        self.layer_call = call._layer_call
        self.state = thread_state()
        self.versions = [source.tensor._version for source in sources]

    def combine(self) -> list[torch.Tensor]:
        combined = []
        for channel in self.channels:
            parts = [part.detach().to(self.lead) for part in channel.parts]
            if channel.weights is None:
                combined.append(self.row_split.joined(torch.cat(parts)))
            else:
                pairs = zip(parts, channel.weights, strict=True)
                own = torch.stack([widened(p) * w for p, w in pairs]).sum(0)
                [total] = self.row_split.summed([own])
                combined.append(total.to(parts[0].dtype))
        return combined

    def backward(self, gradients: Sequence[torch.Tensor | None]) -> list[Any]:
        """Gradients of the sources, from those of the combined channels."""
        if torch.is_grad_enabled():
            return self._differentiable_gradients(gradients)
        outputs: list[list[torch.Tensor]] = [[] for _ in range(self.count)]
        given: list[list[torch.Tensor]] = [[] for _ in range(self.count)]
        for channel, gradient in zip(self.channels, gradients, strict=True):
            if gradient is None:
                continue
            if channel.weights is None:
                gradient = self.row_split.own(gradient)
            shares = _share(channel, gradient)
            for i, (part, share) in enumerate(zip(channel.parts, shares, strict=True)):
                if part.requires_grad:
                    outputs[i].append(part)
                    given[i].append(share.to(part.device, non_blocking=True))
        keep = is_graph_retained()

        def task(replica_id: int) -> Callable[[], list[torch.Tensor | None]]:
            own = [source.locals[replica_id] for source in self.sources]
            wanted = [tensor for tensor in own if tensor is not None]

            def run() -> list[torch.Tensor | None]:
                if not outputs[replica_id] or not wanted:
                    return [None] * len(own)
                found = iter(
                    torch.autograd.grad(
                        outputs[replica_id],
                        wanted,
                        given[replica_id],
                        allow_unused=True,
                        retain_graph=keep,
                    )
                )
                return [None if tensor is None else next(found) for tensor in own]

            return run

        self.collectives.restart()
        sums = None
        if self.row_split.workers is not None:
            sums = WorkerSums(
                self.sources, self.row_split, self.count, self.call.reduction
            )
        with sums or contextlib.nullcontext():
            per_replica = self.call._run(
                [task(i) for i in range(self.count)], self.collectives, NoRandom()
            )
        columns = list(zip(*per_replica, strict=True))
        if sums is not None:
            return sums.gradients(columns)
        found = local_gradients(self.sources, columns, self.call.reduction)
        return list(map(GradientTarget.rounded, self.sources, found))

    def _differentiable_gradients(
        self, gradients: Sequence[torch.Tensor | None]
    ) -> list[Any]:
        """The gradients with a graph, for `create_graph=True`."""
        for source, version in zip(self.sources, self.versions, strict=True):
            if source.tensor._version != version:
                raise ContextError(
                    "A backward pass with `create_graph=True` came after an update "
                    "of a variable of the layer. Compute second-order gradients "
                    "before the optimizer's step."
                )
        with with_thread_state(self.state):
            found = self.call.recompute(self.layer_call, raw_value)
        pairs = [
            (output, gradient)
            for output, gradient in zip(found, gradients, strict=True)
            if gradient is not None and output.requires_grad
        ]
        # A variable is several sources where each of its reads has a gradient.
        wanted = {id(source.tensor): source.tensor for source in self.sources}
        results = torch.autograd.grad(
            [output for output, _ in pairs],
            list(wanted.values()),
            [gradient for _, gradient in pairs],
            create_graph=True,
            allow_unused=True,
        )
        remaining = dict(zip(wanted, results, strict=True))
        return [remaining.pop(id(source.tensor), None) for source in self.sources]


def _share(channel: Channel, gradient: torch.Tensor) -> list[torch.Tensor]:
    """The parts' gradients, from that of the concatenation or weighted sum."""
    if channel.weights is None:
        return list(torch.split(gradient, [part.shape[0] for part in channel.parts]))
    return [gradient * weight for weight in channel.weights]


class _Assigned(torch.autograd.Function):
    """A trained variable's new value; its gradient is the variable's."""

    @staticmethod
    def forward(ctx, current, value):  # type: ignore[no-untyped-def]
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        return gradient, None


class _Boundary(torch.autograd.Function):
    """The edge between the global batch and the replicas in the autograd graph."""

    @staticmethod
    def forward(ctx, job, *sources):  # type: ignore[no-untyped-def]
        ctx.job = job
        ctx.set_materialize_grads(False)
        return tuple(job.combine())

    @staticmethod
    def backward(ctx, *gradients):  # type: ignore[no-untyped-def]
        return (None, *ctx.job.backward(gradients))
