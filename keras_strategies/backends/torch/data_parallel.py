"""The data-parallel call on Torch: threads forward, threads backward."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from keras_strategies import context, keras_compat
from keras_strategies.backends.data_parallel import (
    Channel,
    DataParallelCall,
    ReplicaResult,
    flags,
)
from keras_strategies.backends.torch.devices import torch_device
from keras_strategies.backends.torch.random import NoRandom, RandomCalls, ReplicaRandom
from keras_strategies.backends.torch.replicas import (
    ReplicaThreads,
    Team,
    ThreadCommunicator,
)
from keras_strategies.backends.torch.variables import ReplicaVariables
from keras_strategies.backends.torch.work import Work, measure
from keras_strategies.errors import ContextError
from keras_strategies.input.sharding import split_sizes
from keras_strategies.types import ReduceOp

if TYPE_CHECKING:
    from keras_strategies.backends.base import Workers
    from keras_strategies.strategies.base import Strategy


class TorchDataParallelCall(DataParallelCall):
    """Runs a layer on the threads of a strategy."""

    def __init__(
        self, strategy: Strategy, threads: ReplicaThreads, variables: ReplicaVariables
    ):
        super().__init__(strategy)
        self._devices = [torch_device(d) for d in self.placement.replicas]
        self._lead = torch_device(self.placement.variables)
        self._threads = threads
        self._variables = variables
        self._workers = self.placement.workers
        self._share = self.placement.share
        self._communicator: ThreadCommunicator | None = None
        # How the rows of the call under way are spread.
        self._spread = Spread.local([1])
        self._random_calls = RandomCalls()
        self._random: ReplicaRandom = NoRandom()
        # On one physical device a small call is faster whole; what it computes is the
        # same, unless replicas are to have batch statistics of their own.
        self._may_call_whole = (
            set(self._devices) == {self._lead}
            and strategy.sync_batch_norm
            and not strategy.always_split
            and self._workers is None
        )
        self._work: weakref.WeakKeyDictionary[Any, Work] = weakref.WeakKeyDictionary()
        # How the calls of the current step were made.
        self._were_small: list[bool] = []
        self._foreign: weakref.WeakKeyDictionary[Any, bool] = (
            weakref.WeakKeyDictionary()
        )

    @contextlib.contextmanager
    def step(self, is_small: bool) -> Iterator[Callable[[], bool]]:
        """Entered around a step.

        Where all calls are so small that they are made whole, two kernel threads take
        longer than one: they would meet more often than they work.

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
            with keras_compat.layer_calls_through(self):
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
        if self._has_foreign_modules(layer):
            return None
        every = split_sizes(rows, self._share.total)
        if self._workers is None:
            spread = Spread.local(every)
        else:
            spread = Spread.over(every, self._workers)
            if not all(spread.worker_rows):
                # Too few for all workers: each computes all of them.
                return None
        # Replicas without rows do not take part: they would add nothing.
        sizes = spread.sizes
        if not sizes or (len(spread.every) == 1 and self._devices[0] == self._lead):
            return None
        self._spread = spread
        if self._may_call_whole:
            work = self._work_of(layer, call_few)
            self._were_small.append(not work.worth_splitting(rows, len(sizes)))
            if self._were_small[-1]:
                return None
        return sizes

    def _work_of(self, layer: Any, call_few: Callable[[], int]) -> Work:
        work = self._work.get(layer)
        if work is None:
            work = self._work[layer] = measure(call_few)
        return work

    def _has_foreign_modules(self, layer: Any) -> bool:
        """Whether a layer computes with torch modules that Keras does not run."""
        known = self._foreign.get(layer)
        if known is None:
            known = self._foreign[layer] = keras_compat.wraps_torch_modules(layer)
            if known:
                warnings.warn(
                    f"Layer {layer.name!r} contains torch modules. Their parameters "
                    "cannot be replaced by a replica's copies, so the layer is called "
                    "on one device with the whole batch, which is exact but not "
                    "parallel. Write it with Keras layers to run it on all replicas.",
                    stacklevel=6,
                )
        return known

    def split(self, tensor: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
        parts = torch.split(self._spread.own(tensor.detach()), list(sizes))
        local = [
            part.to(device, non_blocking=True)
            for part, device in zip(parts, self._devices, strict=False)
        ]
        if tensor.requires_grad and torch.is_grad_enabled():
            local = [part.detach().requires_grad_() for part in local]
        return local

    def run(self, tasks: Sequence[Callable[[], Any]]) -> list[Any]:
        # The backward pass of these tasks meets in the same communicator. Calls do
        # not nest: none is routed while one is under way.
        self._communicator = ThreadCommunicator(
            self.placement.replicas[: len(tasks)], team=self._spread.team
        )
        return self._run(tasks, self._communicator, self._random)

    def _run(
        self,
        tasks: Sequence[Callable[[], Any]],
        communicator: ThreadCommunicator,
        random: ReplicaRandom,
    ) -> list[Any]:
        team = communicator.team

        def in_context(replica_id: int, task: Callable[[], Any]) -> Callable[[], Any]:
            replica = context.ReplicaContext(
                self.strategy, team.first + replica_id, communicator, team.total
            )

            def run() -> Any:
                with context.on_replica(replica):
                    return task()

            return run

        return self._threads.run(
            [in_context(i, task) for i, task in enumerate(tasks)], communicator, random
        )

    def copy_variable(self, replica_id: int, variable: Any) -> torch.Tensor | None:
        return self._variables.copy(replica_id, variable)

    def connect(
        self,
        inputs: Sequence[tuple[Any, list[Any]]],
        results: Sequence[ReplicaResult],
        channels: Sequence[Channel],
    ) -> list[torch.Tensor]:
        assert self._communicator is not None
        sources = _sources(inputs, results) if torch.is_grad_enabled() else []
        job = _Job(
            self, channels, sources, len(results), self._communicator, self._spread
        )
        if not sources:
            return job.combine()
        return list(_Boundary.apply(job, *(source.tensor for source in sources)))

    def to_lead(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to(self._lead)

    def joined(self, parts: list[torch.Tensor]) -> torch.Tensor:
        return self._spread.joined(torch.cat([self.to_lead(part) for part in parts]))

    def all_fractions(self, sizes: list[int], rows: int) -> list[float]:
        return self.fractions(self._spread.every, rows)

    def on_all_workers(
        self, columns: list[list[torch.Tensor]]
    ) -> list[list[torch.Tensor]]:
        return self._spread.team.everywhere(columns)

    def probe_input(self, tensor: torch.Tensor, rows: int) -> torch.Tensor:
        return tensor[:rows].detach().to(self._lead)

    def probe(self, fn: Callable[[], list[Any]]) -> list[float]:
        with torch.no_grad():
            return [float(value) for value in fn()]


@dataclass(frozen=True)
class Spread:
    """How the rows of one call are spread over the replicas that take part.

    Args:
        every: the rows of each replica that has any, of all workers.
        sizes: those of the local ones.
        start: int, the first row of this worker.
        worker_rows: the rows of each worker.
        team: the replicas that take part.
    """

    every: list[int]
    sizes: list[int]
    start: int
    worker_rows: list[int]
    team: Team

    @classmethod
    def local(cls, sizes: Sequence[int]) -> Spread:
        """Over the replicas of this process alone."""
        present = [size for size in sizes if size]
        team = Team(None, (len(present),), 0)
        return cls(present, present, 0, [sum(present)], team)

    @classmethod
    def over(cls, sizes: Sequence[int], workers: Workers) -> Spread:
        """Over the replicas of all workers."""
        own, remaining = [], list(sizes)
        for count in workers.replicas:
            own.append([size for size in remaining[:count] if size])
            remaining = remaining[count:]
        index = workers.group.index
        before = own[:index]
        counts = tuple(len(each) for each in own)
        team = Team(workers, counts, sum(counts[:index]))
        return cls(
            [size for each in own for size in each],
            own[index],
            sum(sum(each) for each in before),
            [sum(each) for each in own],
            team,
        )

    @property
    def workers(self) -> Workers | None:
        return self.team.workers

    def own(self, tensor: torch.Tensor) -> torch.Tensor:
        """This worker's rows of a tensor of the global batch."""
        if self.workers is None:
            return tensor
        return tensor[self.start : self.start + sum(self.sizes)]

    def joined(self, tensor: torch.Tensor) -> torch.Tensor:
        """All rows, from those of this worker."""
        if self.workers is None:
            return tensor
        return self.workers.gather_rows(tensor, self.worker_rows)

    def summed(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """The sums over workers."""
        if self.workers is None or not tensors:
            return tensors
        return self.workers.all_reduce(ReduceOp.SUM, tensors)


@dataclass
class _Source:
    """A tensor outside the replicas that gradients go to.

    Args:
        tensor: the variable, or an input of the layer.
        locals: what the replicas computed with instead: their copies of the
            variable (None where a replica did not read it) or their slices.
        by_rows: bool, whether gradients are concatenated, as for an input, or
            summed, as for a variable.
    """

    tensor: torch.Tensor
    locals: list[torch.Tensor | None]
    by_rows: bool

    def gradient(self, parts: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
        """The gradient of the tensor, from those of the replicas."""
        device = self.tensor.device
        if self.by_rows and any(part is not None for part in parts):
            return torch.cat(
                [
                    (torch.zeros_like(local) if part is None else part).to(device)
                    for part, local in zip(parts, self.locals, strict=True)
                    if local is not None
                ]
            )
        present = [part.to(device) for part in parts if part is not None]
        if not present:
            return None
        total = present[0]
        for part in present[1:]:
            total = total + part
        return total


def _sources(
    inputs: Sequence[tuple[Any, list[Any]]], results: Sequence[ReplicaResult]
) -> list[_Source]:
    found: dict[int, _Source] = {}
    for replica_id, result in enumerate(results):
        for key, (variable, local) in result.scope.reads.items():
            if local.requires_grad:
                if key not in found:
                    raw = keras_compat.raw_value(variable)
                    found[key] = _Source(raw, [None] * len(results), by_rows=False)
                found[key].locals[replica_id] = local
    sources = list(found.values())
    for tensor, slices in inputs:
        if slices[0].requires_grad:
            sources.append(_Source(tensor, list(slices), by_rows=True))
    return sources


class _Job:
    """One data-parallel call, between its forward and its backward pass."""

    def __init__(
        self,
        call: TorchDataParallelCall,
        channels: Sequence[Channel],
        sources: Sequence[_Source],
        count: int,
        communicator: ThreadCommunicator,
        spread: Spread,
    ):
        self.call = call
        self.spread = spread
        self.channels = channels
        self.sources = sources
        self.count = count
        self.communicator = communicator
        self.lead = call._lead

    def combine(self) -> list[torch.Tensor]:
        combined = []
        for channel in self.channels:
            parts = [part.detach().to(self.lead) for part in channel.parts]
            if channel.weights is None:
                combined.append(self.spread.joined(torch.cat(parts)))
            else:
                pairs = zip(parts, channel.weights, strict=True)
                own = torch.stack([p * w for p, w in pairs]).sum(0)
                combined.extend(self.spread.summed([own]))
        return combined

    def backward(self, gradients: Sequence[torch.Tensor | None]) -> list[Any]:
        """Gradients of the sources, from those of the combined channels."""
        if torch.is_grad_enabled():
            raise ContextError(
                "`create_graph=True` was asked of a backward pass that goes through a "
                "layer called on several replicas; gradients of gradients do not "
                "cross replicas. Compute the penalty inside a layer's `call`, or use "
                "ks.OneDeviceStrategy for this model."
            )
        outputs: list[list[torch.Tensor]] = [[] for _ in range(self.count)]
        given: list[list[torch.Tensor]] = [[] for _ in range(self.count)]
        for channel, gradient in zip(self.channels, gradients, strict=True):
            if gradient is None:
                continue
            if channel.weights is None:
                gradient = self.spread.own(gradient)
            shares = _share(channel, gradient)
            for i, (part, share) in enumerate(zip(channel.parts, shares, strict=True)):
                if part.requires_grad:
                    outputs[i].append(part)
                    given[i].append(share.to(part.device, non_blocking=True))
        keep = torch._C._autograd._get_current_graph_task_keep_graph()

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

        self.communicator.restart()
        per_replica = self.call._run(
            [task(i) for i in range(self.count)], self.communicator, NoRandom()
        )
        columns = zip(*per_replica, strict=True)
        found = [
            source.gradient(parts)
            for source, parts in zip(self.sources, columns, strict=True)
        ]
        return found if self.spread.workers is None else self._over_workers(found)

    def _over_workers(
        self, found: list[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """The sources' gradients of all workers, from those of this one."""
        present = torch.tensor([float(gradient is not None) for gradient in found])
        summed = [
            torch.zeros_like(source.tensor) if gradient is None else gradient
            for source, gradient in zip(self.sources, found, strict=True)
            if not source.by_rows
        ]
        # Those that a layer computes last have their gradients first.
        *summed, present = self.spread.summed([*reversed(summed), present])
        totals = iter(reversed(summed))
        results: list[torch.Tensor | None] = []
        for source, gradient, count in zip(
            self.sources, found, present.tolist(), strict=True
        ):
            if source.by_rows:
                if gradient is None:
                    gradient = torch.zeros_like(self.spread.own(source.tensor))
                results.append(self.spread.joined(gradient))
            else:
                total = next(totals)
                results.append(total if count else None)
        return results


def _share(channel: Channel, gradient: torch.Tensor) -> list[torch.Tensor]:
    """The parts' gradients, from that of the concatenation or weighted sum."""
    if channel.weights is None:
        return list(torch.split(gradient, [part.shape[0] for part in channel.parts]))
    return [gradient * weight for weight in channel.weights]


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
